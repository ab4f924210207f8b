//go:build faults

package operation

import (
	"fmt"
	"net"
	"os"
)

// faults is the socket on which a crash test listens to a daemon that was built
// for it: each step that is reached is told there, VERB/STEP on a line, and waits
// until the test closes the connection. Meanwhile the test may do what it likes,
// such as end the daemon or fill its disk.
var faults = os.Getenv("BERTH_FAULTS")

// Reached tells a crash test that a step of an operation, or of an RPC by its full
// name, is about to begin.
func Reached(verb, step string) {
	if faults == "" {
		return
	}
	c, err := net.Dial("unix", faults)
	if err != nil {
		return // the test is over
	}
	defer c.Close()
	if _, err := fmt.Fprintf(c, "%s/%s\n", verb, step); err == nil {
		_, _ = c.Read(make([]byte, 1))
	}
}
