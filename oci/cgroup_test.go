package oci

import (
	"errors"
	"testing"
)

func TestCgroupDir(t *testing.T) {
	for _, c := range []struct{ path, dir string }{
		{"/kubepods/pod1/abc", "/kubepods/pod1/abc"},
		{"kubepods/pod1/../abc", "/kubepods/abc"},
		{"kubepods-burstable-pod1.slice:berth:abc", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/berth-abc.scope"},
		{"system.slice:berth:abc", "/system.slice/berth-abc.scope"},
		{"", ""},
		{"/..", ""},
		{"-.slice:berth:abc", ""},
		{"a--b.slice:berth:abc", ""},
		{"a-.slice:berth:abc", ""},
		{".slice:berth:abc", ""},
		{"a.slice:berth", ""},
		{"a.slice::abc", ""},
		{"a.slice:berth:", ""},
		{"a.slice:berth:../abc", ""},
		{"a:berth:abc", ""},
		{"/x/a.slice:berth:abc", ""},
		{"a.slice:b:c:d", ""},
	} {
		dir, err := CgroupDir(c.path)
		if dir != c.dir || (err == nil) != (c.dir != "") || err != nil && !errors.Is(err, ErrCgroupPath) {
			t.Errorf("CgroupDir(%q) = %q, %v; want %q", c.path, dir, err, c.dir)
		}
	}
}
