package stats

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// hugePages is where the kernel lists its sizes of huge pages.
const hugePages = "/sys/kernel/mm/hugepages"

// HugePages is what a cgroup has of huge pages of one size, in bytes.
type HugePages struct {
	Size  string // as the cgroup files say it: "2MB"
	Usage uint64
	Peak  *uint64 // nil where it is not counted, on version 2
}

// hugeSizes reads the directory of "hugepages-2048kB" and the like.
func hugeSizes(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // a kernel without huge pages
	}
	var out []string
	for _, e := range entries {
		text, ok := strings.CutPrefix(e.Name(), "hugepages-")
		kb, err := strconv.ParseUint(strings.TrimSuffix(text, "kB"), 10, 54)
		if ok && err == nil {
			out = append(out, hugeSize(kb))
		}
	}
	return out
}

// hugeSize is a size as cgroup files have it in their names.
func hugeSize(kb uint64) string {
	switch {
	case kb >= 1<<20:
		return fmt.Sprintf("%dGB", kb>>20)
	case kb >= 1<<10:
		return fmt.Sprintf("%dMB", kb>>10)
	default:
		return fmt.Sprintf("%dKB", kb)
	}
}

// huge reads hugetlb.<size>.<usage> in a directory; peak may be empty.
func (c *Cgroups) huge(dir, usage, peak string) []HugePages {
	var out []HugePages
	for _, size := range c.hugeSizes {
		n, err := count(filepath.Join(dir, "hugetlb."+size+"."+usage))
		if err != nil {
			continue // no such controller here
		}
		h := HugePages{Size: size, Usage: n}
		if peak != "" {
			h.Peak, _ = optional(filepath.Join(dir, "hugetlb."+size+"."+peak))
		}
		out = append(out, h)
	}
	return out
}
