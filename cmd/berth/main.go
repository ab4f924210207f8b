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
	root.AddCommand(serveCommand(), group(configCommand()), group(imageCommand()), pullsCommand(), whyCommand())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "berth:", err)
		os.Exit(1)
	}
}

// group makes a command that does nothing itself fail without a verb below it, or
// with one that is not there: a script must notice.
func group(c *cobra.Command) *cobra.Command {
	c.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("unknown command %q for %q\n\n%s", args[0], cmd.CommandPath(), cmd.UsageString())
		}
		return fmt.Errorf("%s: a command is missing\n\n%s", cmd.CommandPath(), cmd.UsageString())
	}
	return c
}
