package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"berth/runtime/admin"
	"berth/runtime/config"
)

// maxReply bounds one answer of the daemon.
const maxReply = 64 << 20

// daemon is the running daemon as the operator's verbs ask it.
type daemon struct {
	socket string
	output string // table or json; see listing
}

// ofDaemon gives a command and those below it the flag --socket.
func ofDaemon(c *cobra.Command) *daemon {
	d := &daemon{}
	c.PersistentFlags().StringVar(&d.socket, "socket", config.Default().Socket, "the daemon's CRI socket")
	return d
}

// listing gives a command that shows something the flag -o.
func (d *daemon) listing(c *cobra.Command) *cobra.Command {
	c.Flags().StringVarP(&d.output, "output", "o", "table", "how to print: table or json")
	c.PreRunE = func(*cobra.Command, []string) error {
		if d.output != "table" && d.output != "json" {
			return fmt.Errorf("flag --output: %q is neither table nor json", d.output)
		}
		return nil
	}
	return c
}

// dial makes a connection, which is used when something is asked. The caller
// closes it.
func (d *daemon) dial() (*grpc.ClientConn, error) {
	socket, err := filepath.Abs(d.socket)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply)))
}

// ask makes one call.
func ask[Req, Reply any](ctx context.Context, d *daemon, m admin.Method[Req, Reply], req Req) (*Reply, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	reply, err := m.Call(ctx, conn, req)
	return reply, d.explain(err)
}

// explain says an error of a call as an operator reads it: message and code.
func (d *daemon) explain(err error) error {
	switch s := status.Convert(err); {
	case err == nil:
		return nil
	case s.Code() == codes.Unimplemented && strings.HasPrefix(s.Message(), "unknown "): // gRPC's own words
		return fmt.Errorf("the daemon at %s is of another version: %s (%s)", d.socket, s.Message(), s.Code())
	case s.Code() == codes.Unavailable:
		return fmt.Errorf("the daemon at %s does not answer: %s (%s)", d.socket, s.Message(), s.Code())
	default:
		return fmt.Errorf("%s (%s)", s.Message(), s.Code())
	}
}

// print shows an answer: as JSON, or as table writes it, whose cells end in
// tabs.
func (d *daemon) print(c *cobra.Command, answer any, table func(w io.Writer)) error {
	out := c.OutOrStdout()
	if d.output == "json" {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		return e.Encode(answer)
	}
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	table(w)
	return w.Flush()
}
