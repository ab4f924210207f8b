package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"berth/runtime/config"
)

// load reads and checks a file with its drop-ins; for berth config check, for the
// daemon's start and for its reload alike.
func load(file string) (*config.File, error) { return config.Load(file, answering, checkNode) }

func configCommand() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Print or check the configuration file"}
	c.AddCommand(&cobra.Command{
		Use: "default", Short: "Print every key with its default and what it means", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			text, err := config.Default().Text()
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}, &cobra.Command{
		Use: "check FILE", Short: "Check a file and its drop-ins, FILE.d/*.toml, as the daemon does at its start", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := load(args[0])
			var problems config.Problems
			if errors.As(err, &problems) {
				for _, p := range problems {
					fmt.Fprintln(cmd.ErrOrStderr(), p)
				}
				return config.ErrInvalid
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: ok\n", args[0])
			return err
		},
	}, &cobra.Command{
		Use: "show FILE", Short: "Print every key as a file and its drop-ins set it, and where", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			f, err := config.Load(args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), f.Show())
			return err
		},
	})
	return c
}
