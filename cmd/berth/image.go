package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"

	"berth/runtime/admin"
)

func imageCommand() *cobra.Command {
	c := &cobra.Command{Use: "image", Short: "Work with the daemon's images"}
	d := ofDaemon(c)
	c.AddCommand(imageImport(d))
	return c
}

func imageImport(d *daemon) *cobra.Command {
	return &cobra.Command{
		Use: "import FILE", Short: "Import a docker or OCI archive (plain, gzip or zstd)", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			reply, err := ask(cmd.Context(), d, admin.ImportImage, admin.ImportRequest{Path: path})
			if err != nil {
				return err
			}
			for _, n := range reply.Images {
				fmt.Fprintln(cmd.OutOrStdout(), n)
			}
			return nil
		},
	}
}
