package main

import (
	"bytes"
	"time"
)

// streamNames as the CRI log format has them; a pty is stdout.
var streamNames = [2]string{"stdout", "stderr"}

// stampLayout keeps all nine digits, so that every stamp is equally long.
const stampLayout = "2006-01-02T15:04:05.000000000Z"

// batchLimit bounds the bytes rendered at once.
const batchLimit = 256 << 10

// render appends the pieces of data to out, "<stamp> <stream> P|F <text>\n" each,
// until out exceeds batchLimit, and says how many bytes of data they took. What
// is left is less than a whole piece. A line longer than maxLine becomes P
// pieces of maxLine bytes and an F piece; with final set, data's end without a
// newline becomes a P piece as well. The same data, stamp and final always give
// the same pieces, and the pieces' texts, with a newline after each F, are data
// again.
func render(out []byte, data []byte, b batch, maxLine int) ([]byte, int) {
	used := 0
	var head [64]byte
	prefix := b.stamp.UTC().AppendFormat(head[:0], stampLayout)
	prefix = append(prefix, ' ')
	prefix = append(prefix, streamNames[b.stream]...)
	prefix = append(prefix, " F "...)
	tag := len(prefix) - 2
	for len(out) < batchLimit && (b.limit == 0 || used < b.limit) {
		rest := data[used:]
		window := rest[:min(len(rest), maxLine+1)]
		n := bytes.IndexByte(window, '\n')
		skip := 1
		prefix[tag] = 'F'
		if n < 0 {
			switch {
			case len(rest) > maxLine:
				n = maxLine
			case b.final && len(rest) > 0:
				n = len(rest)
			default:
				return out, used
			}
			skip, prefix[tag] = 0, 'P'
		}
		out = append(out, prefix...)
		out = append(out, rest[:n]...)
		out = append(out, '\n')
		used += n + skip
	}
	return out, used
}

// batch is what goes to the log in one write.
type batch struct {
	stream int
	stamp  time.Time
	final  bool // the stream ends with data
	limit  int  // bytes of data after which to stop; 0: none
}
