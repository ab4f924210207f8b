// Command berth is the node's CRI runtime (berth serve) and its operator's tool: it
// prints and checks the configuration, and asks the running daemon for its images
// and pulls.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
)

// version is set by the linker.
var version = "0.0.0-dev"

func main() {
	root := &cobra.Command{
		Use:   "berth",
		Short: "A Kubernetes CRI container runtime",
		Long: `berth runs pods for a kubelet: a Kubernetes CRI container runtime.

"berth serve" is the daemon, one for each node, as root. "berth config" prints and
checks its configuration without it. The other commands ask the running daemon, as
root, over its CRI socket; they end with code 0 when all went well, else with code 1
and the reason on the standard error, and take "-o json" where they show something.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version,
	}
	root.AddCommand(serveCommand(), configCommand(), imageCommand(), pullsCommand(), whyCommand())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "berth:", err)
		os.Exit(1)
	}
}
