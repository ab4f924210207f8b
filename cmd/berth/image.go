package main

import (
	"fmt"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"berth/runtime"
	"berth/runtime/config"
)

func imageCommand() *cobra.Command {
	c := &cobra.Command{Use: "image", Short: "Work with the daemon's images"}
	var socket string
	c.PersistentFlags().StringVar(&socket, "socket", config.Default().Socket, "the daemon's CRI socket")
	c.AddCommand(&cobra.Command{
		Use: "import FILE", Short: "Import a docker or OCI archive (plain, gzip or zstd)", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[0])
			if err != nil {
				return err
			}
			if socket, err = filepath.Abs(socket); err != nil {
				return err
			}
			conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return err
			}
			defer conn.Close()
			names, err := runtime.ImportImage(cmd.Context(), conn, path)
			if err != nil {
				return fmt.Errorf("%s (%s)", status.Convert(err).Message(), status.Code(err))
			}
			for _, n := range names {
				fmt.Fprintln(cmd.OutOrStdout(), n)
			}
			return nil
		},
	})
	return c
}
