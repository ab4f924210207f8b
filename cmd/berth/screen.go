package main

import (
	"fmt"
	"io"
	"strings"

	"berth/runtime/admin"
)

// screen is a block of lines at the end of a terminal, which is drawn over and
// over in place.
type screen struct {
	out   io.Writer
	lines int // drawn last time
}

// draw replaces what was drawn before. Lines that do not fit are cut off, and so
// are those at the end of too many: a line that wraps, or one that has scrolled
// away, could not be replaced.
func (s *screen) draw(lines []string, width, height int) error {
	if most := max(height-1, 1); len(lines) > most {
		lines = append(lines[:most-1:most-1], fmt.Sprintf("(%d more lines)", len(lines)-most+1))
	}
	var b strings.Builder
	if s.lines > 0 {
		fmt.Fprintf(&b, "\x1b[%dA", s.lines) // up
	}
	b.WriteString("\r\x1b[J") // and clear the rest
	for _, line := range lines {
		if cut := []rune(line); len(cut) > width {
			line = string(cut[:width])
		}
		b.WriteString(line)
		b.WriteByte('\n')
	}
	s.lines = len(lines)
	_, err := io.WriteString(s.out, b.String())
	return err
}

// pullView are the lines of a live view: a bar for each pull, and one for each
// of its layers that is not here yet.
func pullView(pulls []admin.Pull, width int) []string {
	if len(pulls) == 0 {
		return []string{"no pull is running"}
	}
	var lines []string
	for _, p := range pulls {
		reused, done := 0, 0
		for _, l := range p.Layers {
			switch l.Stage {
			case "reused":
				reused++
			case "done":
				done++
			}
		}
		lines = append(lines, fmt.Sprintf("%s  %s, %s; layers: %d, done: %d, reused: %d", p.Image, p.Stage, age(p.Seconds), len(p.Layers), done, reused))
		if p.Ended {
			if p.Error != "" {
				lines = append(lines, "  "+p.Error)
			}
			continue
		}
		if p.Total == 0 {
			continue
		}
		lines = append(lines, barLine("all", "", amount{p.Bytes, p.Total, p.Rate, p.Left}, width))
		for _, l := range p.Layers {
			if l.Stage != "reused" && l.Stage != "done" {
				lines = append(lines, barLine(short(l.Blob), l.Stage, amount{l.Bytes, l.Total, l.Rate, l.Left}, width))
			}
		}
	}
	return lines
}

// amount is how far something is.
type amount struct {
	bytes, total int64
	rate         float64
	left         *float64
}

// barLine gives the bar what the text leaves of the width.
func barLine(label, stage string, a amount, width int) string {
	head := fmt.Sprintf("  %-12s  %-9s", label, stage)
	tail := fmt.Sprintf("%3d%%  %8s / %-8s", a.bytes*100/max(a.total, 1), size(float64(a.bytes)), size(float64(a.total)))
	rate, left := "", ""
	if a.rate > 0 {
		rate = size(a.rate) + "/s"
	}
	if a.left != nil {
		left = age(*a.left)
	}
	tail += fmt.Sprintf(" %10s  %6s", rate, left)
	room := min(width-len(head)-len(tail)-4, 50)
	if room < 5 {
		return head + " " + tail
	}
	return head + " " + bar(a.bytes, a.total, room) + " " + tail
}

func bar(bytes, total int64, room int) string {
	full := 0
	if total > 0 {
		full = int(min(bytes, total) * int64(room) / total)
	}
	return "[" + strings.Repeat("#", full) + strings.Repeat("-", room-full) + "]"
}
