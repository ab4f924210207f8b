package apparmor

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	profiles "github.com/moby/profiles/apparmor"

	"berth/sandbox/leakcheck"
)

// TestProfileRoot gives the text to the real parser and kernel, where they are.
func TestProfileRoot(t *testing.T) {
	leakcheck.Start(t)
	if enabled, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err != nil || !strings.HasPrefix(string(enabled), "Y") {
		t.Skip("skipped: the kernel has no AppArmor (/sys/module/apparmor/parameters/enabled)")
	}
	if os.Geteuid() != 0 {
		t.Skipf("skipped: needs root, runs as uid %d", os.Geteuid())
	}
	d := New()
	if err := d.Load(); err != nil {
		t.Fatal(err)
	}
	if there, err := profiles.IsLoaded(Name); err != nil || !there {
		t.Fatalf("the profile is not in the kernel: %v, %v", there, err)
	}
	if out, err := exec.Command("sh", "-c", "printf %s "+Name+" > /sys/kernel/security/apparmor/.remove").CombinedOutput(); err != nil {
		t.Fatalf("unload the profile: %v: %s", err, out)
	}
	if err := d.Ensure(); err != nil || d.Problem() != nil {
		t.Fatalf("after it was unloaded: %v", err)
	}
	if there, err := profiles.IsLoaded(Name); err != nil || !there {
		t.Fatalf("the profile did not come back: %v, %v", there, err)
	}
}
