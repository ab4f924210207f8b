// Package streaming serves kubectl's exec, attach and port-forward: it hands out
// URLs that work once and carries the streams of whoever dials them.
//
// It owns the HTTP server, the tokens, the wire protocols (SPDY as kubelet and
// crictl speak it, WebSockets of all versions, SPDY inside WebSockets) and the
// life of each connection. It does not own what a session does: that is a
// Command or a Dial of its caller. Names and numbers of the protocols are those
// of k8s.io/cri-streaming, SPDY itself is k8s.io/streaming's. Nothing is on disk.
//
// Terms: a ticket is what a token stands for; a session is one connection that
// came with a ticket. A session ends when its work is done, when the client is
// gone at whatever point, when it was idle too long, or with the server; then
// nothing of it is left, neither a goroutine nor a descriptor.
package streaming
