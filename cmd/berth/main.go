// Command berth is the node's CRI runtime (berth serve) and its operator's
// tool: the configuration's text and check, and the import of image archives.
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
		Use:           "berth",
		Short:         "A Kubernetes CRI container runtime",
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       version,
	}
	root.AddCommand(serveCommand(), configCommand(), imageCommand(), pullsCommand())
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "berth:", err)
		os.Exit(1)
	}
}
