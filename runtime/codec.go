package runtime

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// listCodec is gRPC's codec with a short way for the lists that the kubelet
// asks for each second. Protobuf's own encoder goes over maps of labels and
// annotations by reflection, once for their size and once more to write them,
// which at hundreds of containers is most of such a call. What is written is the
// same message.
type listCodec struct{ encoding.CodecV2 }

// Marshal encodes replies.
func (c listCodec) Marshal(v any) (mem.BufferSlice, error) {
	var b []byte
	switch m := v.(type) { // all have their items in field 1
	case *cri.ListContainersResponse:
		b = appendItems(m.GetContainers(), appendContainer)
	case *cri.StreamContainersResponse:
		b = appendItems(m.GetContainers(), appendContainer)
	case *cri.ListPodSandboxResponse:
		b = appendItems(m.GetItems(), appendPodSandbox)
	case *cri.StreamPodSandboxesResponse:
		b = appendItems(m.GetPodSandboxes(), appendPodSandbox)
	default:
		return c.CodecV2.Marshal(v)
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

// appendItems encodes a list. The first item tells how much room to make.
func appendItems[T any](items []*T, item func([]byte, *T) []byte) []byte {
	var out, one []byte
	for i, it := range items {
		one = item(one[:0], it)
		if i == 0 {
			out = make([]byte, 0, len(items)*(len(one)+len(one)/8+8))
		}
		out = appendBytes(out, 1, one)
	}
	return out
}

// appendContainer encodes cri.Container.
func appendContainer(b []byte, c *cri.Container) []byte {
	b = appendString(b, 1, c.GetId())
	b = appendString(b, 2, c.GetPodSandboxId())
	if m := c.GetMetadata(); m != nil {
		b = appendBytes(b, 3, appendNumber(appendString(nil, 1, m.GetName()), 2, uint64(m.GetAttempt())))
	}
	if i := c.GetImage(); i != nil {
		spec := appendMap(appendString(nil, 1, i.GetImage()), 2, i.GetAnnotations())
		spec = appendString(spec, 18, i.GetUserSpecifiedImage())
		spec = appendString(spec, 19, i.GetRuntimeHandler())
		b = appendBytes(b, 4, appendString(spec, 20, i.GetImageRef()))
	}
	b = appendString(b, 5, c.GetImageRef())
	b = appendNumber(b, 6, uint64(c.GetState()))
	b = appendNumber(b, 7, uint64(c.GetCreatedAt()))
	b = appendMap(b, 8, c.GetLabels())
	b = appendMap(b, 9, c.GetAnnotations())
	return appendString(b, 10, c.GetImageId())
}

// appendPodSandbox encodes cri.PodSandbox.
func appendPodSandbox(b []byte, p *cri.PodSandbox) []byte {
	b = appendString(b, 1, p.GetId())
	if m := p.GetMetadata(); m != nil {
		meta := appendString(nil, 1, m.GetName())
		meta = appendString(meta, 2, m.GetUid())
		meta = appendString(meta, 3, m.GetNamespace())
		b = appendBytes(b, 2, appendNumber(meta, 4, uint64(m.GetAttempt())))
	}
	b = appendNumber(b, 3, uint64(p.GetState()))
	b = appendNumber(b, 4, uint64(p.GetCreatedAt()))
	b = appendMap(b, 5, p.GetLabels())
	b = appendMap(b, 6, p.GetAnnotations())
	return appendString(b, 7, p.GetRuntimeHandler())
}

func appendBytes(b []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}

// appendString and appendNumber leave out what is empty, as proto3 does.
func appendString(b []byte, field protowire.Number, value string) []byte {
	if value == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), value)
}

func appendNumber(b []byte, field protowire.Number, value uint64) []byte {
	if value == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), value)
}

// appendMap encodes each pair as a message of key (1) and value (2).
func appendMap(b []byte, field protowire.Number, pairs map[string]string) []byte {
	for k, v := range pairs {
		size := 2 + protowire.SizeBytes(len(k)) + protowire.SizeBytes(len(v))
		b = protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(size))
		b = protowire.AppendString(protowire.AppendTag(b, 1, protowire.BytesType), k)
		b = protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), v)
	}
	return b
}
