package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"berth/image"
	"berth/runtime/config"
)

// load reads and checks a file, also where the meaning of a key is a leaf's.
func load(file string) (config.Config, error) {
	cfg, err := config.Load(file)
	if err != nil {
		return cfg, err
	}
	for _, p := range cfg.Image.Pinned {
		if err := image.CheckPin(p); err != nil {
			return cfg, fmt.Errorf("%s: %w: key \"image.pinned\": %w", file, config.ErrInvalid, err)
		}
	}
	return cfg, nil
}

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
		Use: "check FILE", Short: "Check a file as the daemon would at its start", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := load(args[0]); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: ok\n", args[0])
			return err
		},
	})
	return c
}
