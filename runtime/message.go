package runtime

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// What a message may repeat of what a request, an image or a plugin has said.
const (
	maxWord    = 256     // bytes without a space between them: an id, a path
	maxMessage = 4 << 10 // bytes; gRPC clients refuse headers of more than 8 KiB
)

// readable is a message for a caller and for the log: one line without control
// characters, in which long words, and then the middle, are left out.
func readable(text string) string {
	var b strings.Builder
	for word := range strings.SplitSeq(strings.ReplaceAll(text, "\n", "; "), " ") {
		b.WriteByte(' ')
		if n := len(word); n > maxWord {
			word = fmt.Sprintf("%s…(%d bytes)", cutAt(word, maxWord), n)
		}
		b.WriteString(plain(word))
	}
	text = b.String()[1:]
	if len(text) <= maxMessage {
		return text
	}
	const end = maxMessage / 4 // where the cause stands
	from := len(text) - end
	for !utf8.RuneStart(text[from]) {
		from++
	}
	return cutAt(text, maxMessage-end-len(" … ")) + " … " + text[from:]
}

// plain writes what cannot be printed as Go does.
func plain(word string) string {
	if utf8.ValidString(word) && !strings.ContainsFunc(word, unprintable) {
		return word
	}
	var b strings.Builder
	for _, r := range word {
		if unicode.IsPrint(r) && r != utf8.RuneError {
			b.WriteRune(r)
		} else {
			quoted := strconv.QuoteRune(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
	}
	return b.String()
}

// cutAt is the beginning of text, of at most so many bytes, in whole characters.
func cutAt(text string, most int) string {
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most]
}
