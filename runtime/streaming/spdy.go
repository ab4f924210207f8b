package streaming

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

// spdyVersions of the command protocol, the best first. The first version of
// all loses output, and no client of this decade asks for it.
var spdyVersions = []string{remotecommand.StreamProtocolV4Name, remotecommand.StreamProtocolV3Name, remotecommand.StreamProtocolV2Name}

// spdyChannels upgrades and waits until the client has opened its streams; nil
// when it does not.
func (x *session) spdyChannels(w Want) *channels {
	version, err := httpstream.Handshake(x.request, x.w, spdyVersions)
	if err != nil {
		return nil // the client is told
	}
	b := &bundle{streams: map[string]httpstream.Stream{}, ready: make(chan struct{})}
	b.expected = expected(w, version)
	sc := spdy.NewResponseUpgrader().UpgradeResponse(x.w, x.request, b.add)
	if sc == nil {
		return nil
	}
	x.watcher.Go(func() {
		select {
		case <-sc.CloseChan():
			x.end(errGone)
		case <-x.ctx.Done():
			if !x.serverClosed() {
				_ = sc.Close()
			}
		}
	})
	ctx, cancel := context.WithTimeout(x.ctx, creationLimit)
	defer cancel()
	if !b.wait(ctx) {
		_ = sc.Close()
		return nil
	}
	c := &channels{structured: version == remotecommand.StreamProtocolV4Name, finish: func() { _ = sc.Close() }}
	c.status = b.streams[remotecommand.StreamTypeError]
	if s, ok := b.streams[remotecommand.StreamTypeStdin]; ok {
		c.stdin = s
	}
	if s, ok := b.streams[remotecommand.StreamTypeStdout]; ok {
		c.stdout = s
	}
	if s, ok := b.streams[remotecommand.StreamTypeStderr]; ok {
		c.stderr = s
	}
	if s, ok := b.streams[remotecommand.StreamTypeResize]; ok {
		c.resize = s
	}
	return c
}

// expected lists the streams that a client must open.
func expected(w Want, version string) []string {
	names := []string{remotecommand.StreamTypeError}
	for _, s := range []struct {
		wanted bool
		name   string
	}{{w.Stdin, remotecommand.StreamTypeStdin}, {w.Stdout, remotecommand.StreamTypeStdout}, {w.Stderr, remotecommand.StreamTypeStderr},
		{w.Terminal && version != remotecommand.StreamProtocolV2Name, remotecommand.StreamTypeResize}} {
		if s.wanted {
			names = append(names, s.name)
		}
	}
	return names
}

// bundle collects the streams of a command. What nobody asked for is refused at
// once, so that nothing of it stays.
type bundle struct {
	expected []string
	ready    chan struct{} // closed when all are there

	mu      sync.Mutex
	streams map[string]httpstream.Stream // guarded by mu until ready is closed
	replies []<-chan struct{}            // closed when a stream's reply is on its way
}

// add takes a stream that the client opens. It never waits.
func (b *bundle) add(s httpstream.Stream, replied <-chan struct{}) error {
	name := s.Headers().Get(remotecommand.StreamType)
	b.mu.Lock()
	defer b.mu.Unlock()
	if !slices.Contains(b.expected, name) || b.streams[name] != nil {
		return fmt.Errorf("stream %q is not expected", name)
	}
	b.streams[name] = s
	b.replies = append(b.replies, replied)
	if len(b.streams) == len(b.expected) {
		close(b.ready)
	}
	return nil
}

// wait returns true when all streams are open for both sides.
func (b *bundle) wait(ctx context.Context) bool {
	select {
	case <-b.ready:
	case <-ctx.Done():
		return false
	}
	for _, replied := range b.replies {
		select {
		case <-replied:
		case <-ctx.Done():
			return false
		}
	}
	return true
}
