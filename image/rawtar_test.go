package image

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// tarForm is one of the ways to write a tar.
type tarForm int

const (
	gnuForm tarForm = iota // long names in entries of their own, whole seconds, no attributes
	paxForm                // records in front of the entry
)

// member is one entry of a tar, byte for byte as a test wants it. Unlike
// archive/tar's writer, encode has no opinion on what an entry may say.
type member struct {
	name, link   string
	kind         byte
	mode         int64
	uid, gid     int64
	when         time.Time
	major, minor int64
	body         string
	xattrs       map[string]string
	hole         int64 // >0: body stands behind a hole of so many bytes
	promised     int64 // >0: the size that the header says, whatever follows
}

// encodeTar writes entries and the end mark.
func encodeTar(form tarForm, members ...member) []byte {
	var b bytes.Buffer
	for _, m := range members {
		m.encode(&b, form)
	}
	b.Write(make([]byte, 1024))
	return b.Bytes()
}

func (m member) encode(b *bytes.Buffer, form tarForm) {
	if form == gnuForm {
		m.encodeGNU(b)
		return
	}
	records := map[string]string{}
	for key, value := range m.xattrs {
		records["SCHILY.xattr."+key] = value
	}
	for key, value := range map[string]string{"path": m.name, "linkpath": m.link} {
		if len(value) > 100 || strings.ContainsFunc(value, func(r rune) bool { return r > 126 }) {
			records[key] = value
		}
	}
	if m.when.Nanosecond() != 0 || m.when.Unix() < 0 {
		records["mtime"] = decimal(m.when)
	}
	for key, id := range map[string]int64{"uid": m.uid, "gid": m.gid} {
		if id >= 1<<21 {
			records[key] = fmt.Sprint(id)
		}
	}
	body := m.body
	if m.hole > 0 {
		records["GNU.sparse.major"], records["GNU.sparse.minor"] = "1", "0"
		records["GNU.sparse.name"], records["GNU.sparse.realsize"] = m.name, fmt.Sprint(m.hole+int64(len(body)))
		body = string(padded(fmt.Sprintf("1\n%d\n%d\n", m.hole, len(body)))) + body
	}
	if len(records) > 0 {
		var text strings.Builder
		for _, key := range slices.Sorted(maps.Keys(records)) {
			text.WriteString(paxRecord(key, records[key]))
		}
		block(b, member{name: "PaxHeaders/x", kind: 'x', body: text.String(), mode: 0o644}, int64(text.Len()), "ustar\x0000")
		b.Write(padded(text.String()))
	}
	block(b, m, int64(len(body)), "ustar\x0000")
	b.Write(padded(body))
}

func (m member) encodeGNU(b *bytes.Buffer) {
	for kind, text := range map[byte]string{'L': m.name, 'K': m.link} {
		if len(text) > 100 {
			block(b, member{name: "././@LongLink", kind: kind, mode: 0o644}, int64(len(text)+1), "ustar  \x00")
			b.Write(padded(text + "\x00"))
		}
	}
	if m.hole == 0 {
		block(b, m, int64(len(m.body)), "ustar  \x00")
		b.Write(padded(m.body))
		return
	}
	var head bytes.Buffer
	m.kind = 'S'
	block(&head, m, int64(len(m.body)), "ustar  \x00")
	h := head.Bytes()
	for at, n := range map[int]int64{386: m.hole, 398: int64(len(m.body)), 483: m.hole + int64(len(m.body))} {
		copy(h[at:], number(n, 12))
	}
	seal(h)
	b.Write(h)
	b.Write(padded(m.body))
}

// block writes one header.
func block(b *bytes.Buffer, m member, size int64, magic string) {
	h := make([]byte, 512)
	copy(h[:100], m.name)
	copy(h[100:], number(m.mode, 8))
	copy(h[108:], number(m.uid, 8))
	copy(h[116:], number(m.gid, 8))
	if m.promised > 0 {
		size = m.promised
	}
	copy(h[124:], number(size, 12))
	copy(h[136:], number(m.when.Unix(), 12))
	if m.when.IsZero() {
		copy(h[136:], number(0, 12))
	}
	h[156] = m.kind
	copy(h[157:257], m.link)
	copy(h[257:], magic)
	copy(h[329:], number(m.major, 8))
	copy(h[337:], number(m.minor, 8))
	seal(h)
	b.Write(h)
}

// seal sets a header's sum.
func seal(h []byte) {
	copy(h[148:], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
}

// number writes octal digits where they suffice, else GNU's binary form.
func number(n int64, width int) []byte {
	if text := strconv.FormatInt(n, 8); n >= 0 && len(text) < width {
		return []byte(strings.Repeat("0", width-1-len(text)) + text + "\x00")
	}
	out := make([]byte, width)
	for i := width - 1; i >= 0; i-- {
		out[i] = byte(n)
		n >>= 8
	}
	out[0] |= 0x80
	return out
}

func paxRecord(key, value string) string {
	rest := " " + key + "=" + value + "\n"
	size := len(rest)
	for len(strconv.Itoa(size))+len(rest) != size {
		size = len(strconv.Itoa(size)) + len(rest)
	}
	return strconv.Itoa(size) + rest
}

// decimal is a time as PAX has it.
func decimal(t time.Time) string {
	seconds, nanos := t.Unix(), int64(t.Nanosecond())
	if seconds < 0 && nanos > 0 {
		return fmt.Sprintf("-%d.%09d", -(seconds + 1), 1_000_000_000-nanos)
	}
	return fmt.Sprintf("%d.%09d", seconds, nanos)
}

// padded fills up to whole blocks.
func padded(text string) []byte {
	return append([]byte(text), make([]byte, (512-len(text)%512)%512)...)
}
