package runtime

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// fill sets every field of a message, and of those in it, to something of its
// own: a field that a new version of CRI brings is among them.
func fill(m protoreflect.Message, seed int) {
	fields := m.Descriptor().Fields()
	value := func(f protoreflect.FieldDescriptor, n int) protoreflect.Value {
		switch f.Kind() {
		case protoreflect.StringKind:
			return protoreflect.ValueOfString(fmt.Sprintf("%s %d é", f.Name(), n))
		case protoreflect.BoolKind:
			return protoreflect.ValueOfBool(true)
		case protoreflect.EnumKind:
			return protoreflect.ValueOfEnum(1)
		case protoreflect.Int64Kind:
			return protoreflect.ValueOfInt64(-int64(n) - 1<<40)
		case protoreflect.Uint32Kind:
			return protoreflect.ValueOfUint32(uint32(n) + 1<<31)
		}
		panic("a kind that no list had before: " + f.Kind().String())
	}
	for i := range fields.Len() {
		switch f := fields.Get(i); {
		case f.IsMap():
			for n := range 3 {
				m.Mutable(f).Map().Set(value(f.MapKey(), seed+n).MapKey(), value(f.MapValue(), n))
			}
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("").MapKey(), protoreflect.ValueOfString(""))
		case f.IsList():
			for n := range 3 {
				fill(m.Mutable(f).List().AppendMutable().Message(), seed+n)
			}
		case f.Kind() == protoreflect.MessageKind:
			fill(m.Mutable(f).Message(), seed)
		default:
			m.Set(f, value(f, seed+i))
		}
	}
}

// The short way writes the same messages as protobuf's, with all fields set, with
// none, and with none in the messages within.
func TestListCodec(t *testing.T) {
	codec := listCodec{encoding.GetCodecV2(grpcproto.Name)}
	full := func(m proto.Message) proto.Message { fill(m.ProtoReflect(), 7); return m }
	long := strings.Repeat("x", 40_000)
	for name, m := range map[string]proto.Message{
		"containers":         full(&cri.ListContainersResponse{}),
		"stream containers":  full(&cri.StreamContainersResponse{}),
		"pods":               full(&cri.ListPodSandboxResponse{}),
		"stream pods":        full(&cri.StreamPodSandboxesResponse{}),
		"no containers":      &cri.ListContainersResponse{},
		"no pods":            &cri.ListPodSandboxResponse{},
		"empty containers":   &cri.ListContainersResponse{Containers: []*cri.Container{{}, {Metadata: &cri.ContainerMetadata{}, Image: &cri.ImageSpec{}}}},
		"empty pods":         &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{{}, {Metadata: &cri.PodSandboxMetadata{}}}},
		"long ones":          &cri.ListContainersResponse{Containers: []*cri.Container{{Id: "a"}, {Annotations: map[string]string{long: long}, Id: long}}},
		"long ones, of pods": &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{{Labels: map[string]string{"": long, long: ""}}}},
		"another message":    full(&cri.VersionResponse{}),
	} {
		data, err := codec.Marshal(m)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got := m.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(data.Materialize(), got); err != nil || !proto.Equal(got, m) {
			t.Errorf("%s: %v\n got %v\nwant %v", name, err, got, m)
		}
		data.Free()
	}
}
