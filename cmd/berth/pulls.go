package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"berth/runtime/admin"
)

// How often the daemon is asked while somebody watches.
const (
	refreshScreen = 200 * time.Millisecond
	refreshLines  = time.Second
)

func pullsCommand() *cobra.Command {
	var watch bool
	c := &cobra.Command{
		Use: "pulls", Short: "Show the pulls and imports that run, by layer", Args: cobra.NoArgs,
		Long: `Show each pull and import that runs, or ended in the last ten seconds: its stage,
age, bytes (compressed, of the layers that are not here yet), rate over the last
seconds and the time that is left at this rate; and the same of each layer.

A layer waits for its turn, or for another pull that fetches it; it is fetched and
unpacked in one go ("fetching"), may still be unpacked when its last byte is here
("unpacking"), is compared with its digests ("verifying"), and is done. Layers that
were here, or that another pull brought, are "reused".

With --watch it goes on until it is interrupted: on a terminal as a live view with
bars, else as a table every second, with -o json as one line every second.`,
	}
	d := ofDaemon(c)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		if watch {
			return watchPulls(cmd, d)
		}
		reply, err := ask(cmd.Context(), d, admin.Pulls, admin.PullsRequest{})
		if err != nil {
			return err
		}
		return d.print(cmd, reply, func(w io.Writer) { pullTable(w, reply.Pulls) })
	}
	c.Flags().BoolVarP(&watch, "watch", "w", false, "go on until interrupted")
	return d.listing(c)
}

// watchPulls shows pulls over and over, on one connection.
func watchPulls(cmd *cobra.Command, d *daemon) error {
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	conn, err := d.dial()
	if err != nil {
		return err
	}
	defer conn.Close()
	show, every := shower(cmd, d)
	for {
		reply, err := admin.Pulls.Call(ctx, conn, admin.PullsRequest{})
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return d.explain(err)
		}
		if err := show(reply); err != nil {
			return err
		}
		if pause(ctx, every) != nil {
			return nil
		}
	}
}

// shower picks the way to show answers one after another.
func shower(cmd *cobra.Command, d *daemon) (show func(*admin.PullsReply) error, every time.Duration) {
	out := cmd.OutOrStdout()
	f, ok := out.(*os.File)
	switch {
	case d.output == "json":
		return func(r *admin.PullsReply) error { return json.NewEncoder(out).Encode(r) }, refreshLines
	case ok && term.IsTerminal(int(f.Fd())):
		s := &screen{out: out}
		return func(r *admin.PullsReply) error {
			width, height, err := term.GetSize(int(f.Fd()))
			if err != nil || width == 0 || height == 0 { // a terminal that nobody has sized
				width, height = 80, 24
			}
			return s.draw(pullView(r.Pulls, width), width, height)
		}, refreshScreen
	}
	return func(r *admin.PullsReply) error {
		return d.print(cmd, r, func(w io.Writer) { pullTable(w, r.Pulls) })
	}, refreshLines
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// pullTable writes a row for each pull and one for each of its layers.
func pullTable(w io.Writer, pulls []admin.Pull) {
	fmt.Fprintln(w, "IMAGE / LAYER\tSTAGE\tAGE\tBYTES\tOF\tRATE\tLEFT")
	for _, p := range pulls {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", p.Image, p.Stage, age(p.Seconds), amounts(p.Bytes, p.Total, p.Rate, p.Left))
		if p.Error != "" {
			fmt.Fprintf(w, "  %s\n", p.Error)
		}
		for _, l := range p.Layers {
			fmt.Fprintf(w, "  %s\t%s\t\t%s\n", short(l.Blob), l.Stage, amounts(l.Bytes, l.Total, l.Rate, l.Left))
		}
	}
}

// amounts are the last four columns.
func amounts(bytes, total int64, rate float64, left *float64) string {
	cells := []string{size(float64(bytes)), size(float64(total)), "", ""}
	if total == 0 {
		cells[0], cells[1] = "", ""
	}
	if rate > 0 {
		cells[2] = size(rate) + "/s"
	}
	if left != nil {
		cells[3] = age(*left)
	}
	return strings.Join(cells, "\t")
}

func size(bytes float64) string { return units.HumanSizeWithPrecision(bytes, 3) }

// age is a duration of so many seconds in at most two units.
func age(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

// short is a digest or id as it is shown: twelve digits.
func short(digest string) string {
	_, hex, ok := strings.Cut(digest, ":")
	if !ok {
		hex = digest
	}
	return hex[:min(12, len(hex))]
}
