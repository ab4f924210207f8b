package monitor

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// DefaultThreadSignals undoes that this process's own parent had the signals 32
// to 34 ignored. Go leaves them alone, as the C library's threads use them, so
// they would stay ignored in every container: what is ignored survives exec.
func DefaultThreadSignals() {
	var action struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	for sig := uintptr(32); sig <= 34; sig++ {
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&action)), 0, 8, 0, 0)
	}
}
