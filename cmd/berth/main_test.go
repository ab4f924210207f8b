package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// A group of commands by itself, or with a verb that it does not have, is an error
// that lists the verbs.
func TestGroupsNeedAVerb(t *testing.T) {
	for name, make := range map[string]func() *cobra.Command{"image": imageCommand, "config": configCommand} {
		for _, args := range [][]string{{name}, {name, "foo"}, {name, "foo", "bar"}} {
			root := &cobra.Command{Use: "berth", SilenceUsage: true, SilenceErrors: true}
			root.AddCommand(group(make()))
			root.SetArgs(args)
			err := root.Execute()
			if err == nil || !strings.Contains(err.Error(), "Available Commands:") {
				t.Errorf("%q: %v", args, err)
			}
			if len(args) > 1 && !strings.Contains(err.Error(), `unknown command "foo" for "berth `+name+`"`) {
				t.Errorf("%q: %v", args, err)
			}
		}
	}
}

// An empty FILE is not the working directory.
func TestEmptyFile(t *testing.T) {
	for _, args := range [][]string{{"import", ""}, {"export", "name", ""}} {
		c := imageCommand()
		c.SilenceUsage, c.SilenceErrors = true, true
		c.SetArgs(args)
		if err := c.Execute(); err == nil || err.Error() != "FILE is empty" {
			t.Errorf("%q: %v", args, err)
		}
	}
}
