package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"berth/runtime/admin"
)

func whyCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "why [POD|CONTAINER]", Short: "Show what operations wait for, and why a pod or container is as it is", Args: cobra.MaximumNArgs(1),
		Long: `Show each running operation, pull, exec, attach and port-forward: its step, since
when, and what it waits for: a lock and who holds it, a path that does not answer, the
processes that run for it (CNI plugins, the OCI runtime's commands, and their
children; for a stop also the containers that are to end), with state and place in
the kernel.

With the name of a pod (NAME or NAMESPACE/NAME) or container, or an id or the
beginning of one, only those of that pod or container, then its state, why it is not
ready or has ended, and the last operation on it that failed; also of one that could
not be made.`,
	}
	d := ofDaemon(c)
	c.RunE = func(cmd *cobra.Command, args []string) error {
		req := admin.WhyRequest{}
		if len(args) > 0 {
			req.Object = args[0]
		}
		reply, err := ask(cmd.Context(), d, admin.Why, req)
		if err != nil {
			return err
		}
		return d.print(cmd, reply, func(w io.Writer) { whyTable(w, reply) })
	}
	return d.listing(c)
}

// whyTable writes a row for each operation and process, then the objects.
func whyTable(w io.Writer, r *admin.WhyReply) {
	if len(r.Operations) > 0 {
		fmt.Fprintln(w, "OPERATION / PROCESS\tAGE\tSTEP\tSINCE\tOBJECT")
	} else {
		fmt.Fprintln(w, "No operation runs.")
	}
	for _, o := range r.Operations {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", o.Verb, age(o.Seconds), o.Step, age(o.StepSeconds), o.Object)
		for _, p := range o.Waits {
			if p.PID == 0 {
				fmt.Fprintf(w, "  %s\n", p.What)
				continue
			}
			fmt.Fprintf(w, "  %s, pid %d\t\tstate %s at %s\n", p.What, p.PID, p.State, cmp.Or(p.Channel, "-"))
		}
	}
	for _, o := range r.Objects {
		fmt.Fprintf(w, "%s is %s: %s\n", strings.TrimSpace(o.Kind+" "+short(o.ID)), o.State, o.Name)
		if o.Reason != "" {
			fmt.Fprintf(w, "  %s\n", o.Reason)
		}
		if o.Log != "" {
			fmt.Fprintf(w, "  its log: %s\n", o.Log)
		}
		if f := o.Failed; f != nil {
			fmt.Fprintf(w, "  %s failed at %s, step %q: %s\n", f.Verb, f.At.Format("2006-01-02 15:04:05"), f.Step, f.Error)
		}
	}
}
