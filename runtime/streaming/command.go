package streaming

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"

	"github.com/gorilla/websocket"

	"berth/oci"
)

// channels are the streams of a command, whichever protocol carries them.
type channels struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	status         io.Writer
	resize         io.Reader // nil: none
	structured     bool      // the status is JSON
	finish         func()    // says goodbye to the client
}

// serveCommand runs a command over the request's protocol.
func (x *session) serveCommand(w Want, command Command) {
	var c *channels
	switch {
	case websocket.IsWebSocketUpgrade(x.request):
		c = x.websocketChannels(w)
	case isUpgrade(x.request, "SPDY/3.1"):
		c = x.spdyChannels(w)
	default:
		refuseUpgrade(x.w)
	}
	if c == nil {
		return
	}
	streams := oci.Streams{Stdin: c.stdin, Stdout: c.stdout, Stderr: c.stderr}
	if w.Terminal && c.resize != nil {
		streams.Resize = sizes(c.resize)
	}
	code, err := command(x.ctx, streams)
	if err != nil && x.serverClosed() {
		err = ErrClosed
	}
	if x.ctx.Err() == nil || x.serverClosed() {
		statusOf(code, err).write(c.status, c.structured)
	}
	c.finish()
}

func isUpgrade(r *http.Request, protocol string) bool {
	return strings.Contains(strings.ToLower(r.Header.Get("Connection")), "upgrade") &&
		strings.EqualFold(r.Header.Get("Upgrade"), protocol)
}

func refuseUpgrade(w http.ResponseWriter) {
	http.Error(w, "this URL is for an upgrade to SPDY/3.1 or a WebSocket", http.StatusBadRequest)
}

// sizes decodes what comes over a resize stream until its end. Only the latest
// size is kept, so nothing waits for a reader that may never come.
func sizes(r io.Reader) <-chan oci.Size {
	c := make(chan oci.Size, 1)
	go func() {
		defer close(c)
		for d := json.NewDecoder(r); ; {
			var s struct{ Width, Height uint16 }
			if d.Decode(&s) != nil {
				_, _ = io.Copy(io.Discard, r)
				return
			}
			select {
			case <-c:
			default:
			}
			c <- oci.Size{Columns: s.Width, Rows: s.Height}
		}
	}()
	return c
}
