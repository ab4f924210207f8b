package leash

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// What it costs to hold a program that does nothing.
func BenchmarkHold(b *testing.B) {
	l, err := Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for _, held := range []bool{false, true} {
		b.Run(map[bool]string{false: "free", true: "held"}[held], func(b *testing.B) {
			for b.Loop() {
				cmd := exec.Command("/bin/true")
				end := func(bool) {}
				if held {
					var dir *os.File
					if dir, end, err = l.Hold("test", "pod"); err != nil {
						b.Fatal(err)
					}
					cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
				}
				if err := cmd.Run(); err != nil {
					b.Fatal(err)
				}
				end(false)
			}
		})
	}
	b.Run("moved", func(b *testing.B) {
		for b.Loop() {
			dir, end, err := l.Hold("test", "pod")
			if err != nil {
				b.Fatal(err)
			}
			cmd := exec.Command("/bin/sleep", "100")
			cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
			if err := cmd.Start(); err != nil {
				b.Fatal(err)
			}
			end(false)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
}
