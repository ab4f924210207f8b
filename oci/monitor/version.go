package monitor

import "fmt"

// Versions of the protocol that this build speaks. The newest changes when an
// older end would misunderstand; what an older end merely lacks is an extension
// instead, and a field that it does not know it passes over. hello agrees on a
// version. Whatever the versions, an end understands frames, hello, answer and
// renew: so a monitor of any release can be asked to become another build.
const (
	Version = 1 // the newest
	Oldest  = 1
)

// Extensions: the monitor names its own in the answer to hello, and the daemon
// asks for nothing else.
const (
	ExtAttach = "attach" // the operations attach, detach, closestdin and detached
	ExtRenew  = "renew"  // the operation renew, and sessions in hello
)

// Agree is the version that both ends speak: the monitor's answer to a hello. The
// oldest of a peer that names only one version is 0. ErrVersion when there is none.
func Agree(newest, oldest int) (int, error) {
	if oldest == 0 {
		oldest = newest
	}
	v := min(newest, Version)
	if v < oldest || v < Oldest {
		return 0, fmt.Errorf("the monitor speaks %s of the protocol, its peer %s: %w", versions(Oldest, Version), versions(oldest, newest), ErrVersion)
	}
	return v, nil
}

func versions(oldest, newest int) string {
	if oldest == newest {
		return fmt.Sprintf("version %d", newest)
	}
	return fmt.Sprintf("versions %d to %d", oldest, newest)
}
