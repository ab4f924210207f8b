package layer

import (
	"errors"
	"fmt"
)

// ErrInvalid means that the layer's content is refused: malformed, out of
// bounds or contradictory. The message names the entry.
var ErrInvalid = errors.New("invalid layer")

// invalid makes an ErrInvalid that names an entry. Names are quoted, because
// they may hold anything, and cut, because they may be long.
func invalid(name, format string, args ...any) error {
	return fmt.Errorf("%w: entry %s: %s", ErrInvalid, quote(name), fmt.Sprintf(format, args...))
}

// failed names the entry and the operation of a system call that failed.
func failed(op, name string, err error) error {
	return fmt.Errorf("%s entry %s: %w", op, quote(name), err)
}

func quote(name string) string {
	const most = 300
	if len(name) > most {
		return fmt.Sprintf("%q… (%d bytes)", name[:most], len(name))
	}
	return fmt.Sprintf("%q", name)
}
