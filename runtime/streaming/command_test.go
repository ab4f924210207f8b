package streaming

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"berth/oci"
)

// A URL works once, for its own kind of session, and not for long.
func TestTicket(t *testing.T) {
	s := newServer(t, Options{})
	to := must(s.Exec(Want{Stdout: true}, echo(0)))(t)
	if !strings.HasPrefix(to, "http://127.0.0.1:") || !strings.Contains(to, "/exec/") {
		t.Errorf("URL %s, want a loopback host and /exec/", to)
	}
	c, err := dialSPDY(t, to, "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	st := open(t, c, "error", "stdout")
	if got := decode(t, readAll(t, st["error"])); got.Status != "Success" {
		t.Errorf("status %+v, want Success", got)
	}
	_ = c.Close()
	other := must(s.Exec(Want{Stdout: true}, echo(0)))(t)
	for _, u := range [][2]string{{"used", to}, {"for something else", strings.Replace(other, "/exec/", "/attach/", 1)},
		{"and gone then", other}, {"unknown", s.base.JoinPath("exec", "nonsense").String()}, {"the root", s.base.String()}} {
		if _, err := dialSPDY(t, u[1], "v4.channel.k8s.io"); err == nil || !strings.Contains(err.Error(), "404") && !strings.Contains(err.Error(), "not found") {
			t.Errorf("%s: %v, want not found", u[0], err)
		}
	}
	if a, b := must(s.Exec(Want{Stdout: true}, echo(0)))(t), must(s.Exec(Want{Stdout: true}, echo(0)))(t); a == b || len(a)-strings.LastIndex(a, "/") < 22 {
		t.Errorf("tokens of %s and %s: want different ones of at least 21 characters", a, b)
	}
}

func TestTicketExpires(t *testing.T) {
	s := newServer(t, Options{Lifetime: 50 * time.Millisecond})
	to := must(s.Exec(Want{Stdout: true}, echo(0)))(t)
	time.Sleep(60 * time.Millisecond)
	if _, err := dialSPDY(t, to, "v4.channel.k8s.io"); err == nil {
		t.Error("an old URL works")
	}
	s.tickets.lifetime = time.Nanosecond // what is too old leaves room
	for range maxTickets + 1 {
		if _, err := s.Exec(Want{Stdout: true}, echo(0)); err != nil {
			t.Fatalf("old URLs are in the way: %v", err)
		}
	}
	s.tickets.lifetime = time.Hour
	for range maxTickets {
		if _, err := s.Exec(Want{Stdout: true}, echo(0)); err != nil {
			t.Fatalf("within the bound: %v", err)
		}
	}
	if _, err := s.Exec(Want{Stdout: true}, echo(0)); !errors.Is(err, ErrTooMany) {
		t.Errorf("one more: %v, want ErrTooMany", err)
	}
}

// What an unspecified address becomes in a URL can be dialled on the node.
func TestAddress(t *testing.T) {
	for listen, host := range map[string]string{"0.0.0.0:0": "127.0.0.1:", "[::]:0": "[::1]:", "127.0.0.1:0": "127.0.0.1:", "[::1]:0": "[::1]:"} {
		s := newServer(t, Options{Address: listen})
		to := must(s.Exec(Want{Stdout: true}, echo(0)))(t)
		if !strings.HasPrefix(s.Addr(), host) || !strings.HasPrefix(to, "http://"+host) {
			t.Errorf("listening on %s: URL %s, want host %s", listen, to, host)
		}
		c, err := dialSPDY(t, to, "v4.channel.k8s.io")
		if err != nil {
			t.Errorf("%s: %v", to, err)
			continue
		}
		_ = c.Close()
	}
	if _, err := New(Options{Address: "192.0.2.1:1"}); err == nil {
		t.Error("an address that is not the node's is accepted")
	}
}

func TestSPDYCommand(t *testing.T) {
	s := newServer(t, Options{})
	for version, want := range map[string]string{"v4.channel.k8s.io": `"ExitCode"`, "v3.channel.k8s.io": "exit code 7", "v2.channel.k8s.io": "exit code 7"} {
		to := must(s.Exec(Want{Stdin: true, Stdout: true, Stderr: true}, echo(7)))(t)
		c, err := dialSPDY(t, to, version)
		if err != nil {
			t.Fatal(err)
		}
		st := open(t, c, "error", "stdin", "stdout", "stderr")
		_, _ = io.WriteString(st["stdin"], "hello")
		_ = st["stdin"].Close()
		if got := readAll(t, st["stdout"]); got != "hello" {
			t.Errorf("%s: stdout %q", version, got)
		}
		if got := readAll(t, st["stderr"]); got != "echo" {
			t.Errorf("%s: stderr %q", version, got)
		}
		if got := readAll(t, st["error"]); !strings.Contains(got, want) {
			t.Errorf("%s: status %q, want %q in it", version, got, want)
		}
		_ = c.Close()
	}
	for _, versions := range [][]string{{"v9.channel.k8s.io"}, nil} {
		if _, err := dialSPDY(t, must(s.Exec(Want{Stdout: true}, echo(0)))(t), versions...); err == nil {
			t.Errorf("versions %v are accepted", versions)
		}
	}
	res := must(http.Get(must(s.Exec(Want{Stdout: true}, echo(0)))(t)))(t)
	if _ = res.Body.Close(); res.StatusCode != http.StatusBadRequest {
		t.Errorf("a plain request: %s, want 400", res.Status)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestStatus(t *testing.T) {
	got := statusOf(0, errors.New("no such command"))
	if got.Status != "Failure" || got.Reason != "InternalError" || got.Message != "no such command" || got.Code != 500 {
		t.Errorf("of an error: %+v", got)
	}
	got = statusOf(3, nil)
	if got.Status != "Failure" || got.Reason != "NonZeroExitCode" || got.Details.Causes[0] != (cause{"ExitCode", "3"}) {
		t.Errorf("of code 3: %+v", got)
	}
	var b strings.Builder
	statusOf(0, nil).write(&b, false)
	if b.Len() != 0 {
		t.Errorf("plain text of a success: %q, want nothing", b.String())
	}
}

// Streams that nobody asked for are refused at once, and nothing of them stays.
func TestSPDYUnexpectedStreams(t *testing.T) {
	s := newServer(t, Options{})
	wait, ended := waiter()
	run, begun := announced(wait)
	c, err := dialSPDY(t, must(s.Attach(Want{Stdout: true}, run))(t), "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	st := open(t, c, "stdout")
	for _, name := range []string{"stdin", "stdout", "resize", "nonsense"} {
		if x, err := c.CreateStream(http.Header{"Streamtype": []string{name}}); err == nil {
			if _, err := x.Read(make([]byte, 1)); err == nil {
				t.Errorf("stream %s is open", name)
			}
		}
	}
	_ = open(t, c, "error")
	_ = await(t, "the command runs", begun)
	_ = st["stdout"].Reset()
	_ = c.Close()
	if err := await(t, "the command ends", ended); !errors.Is(err, errGone) {
		t.Errorf("it ended by %v, want errGone", err)
	}
}

func TestWebSocketCommand(t *testing.T) {
	s := newServer(t, Options{})
	for _, version := range socketVersions {
		to := must(s.Exec(Want{Stdin: true, Stdout: true, Stderr: true}, func(ctx context.Context, st oci.Streams) (int32, error) {
			b := make([]byte, 5)
			_, _ = io.ReadFull(st.Stdin, b)
			_, _ = st.Stdout.Write(b)
			_, _ = io.WriteString(st.Stderr, "no")
			return 7, nil
		}))(t)
		ws, _, err := dialSocket(t, to, "other.channel.k8s.io", version)
		if err != nil {
			t.Fatalf("%s: %v", version, err)
		}
		coded := strings.Contains(version, "base64")
		head, text := func(n byte) byte { return n }, func(x string) string { return x }
		if coded {
			head = func(n byte) byte { return '0' + n }
			text = func(x string) string { return base64.StdEncoding.EncodeToString([]byte(x)) }
		}
		_ = ws.WriteMessage(websocket.BinaryMessage, append([]byte{head(0)}, text("hello")...))
		got, err := messages(ws)
		_ = ws.Close()
		if err != nil || got[head(1)] != text("hello") || got[head(2)] != text("no") {
			t.Errorf("%s: %q, %v", version, got, err)
		}
		said := got[head(3)]
		if coded {
			b, _ := base64.StdEncoding.DecodeString(said)
			said = string(b)
		}
		if structured := strings.HasPrefix(version, "v"); structured != strings.HasPrefix(said, "{") || !strings.Contains(said, "7") {
			t.Errorf("%s: status %q", version, said)
		}
	}
	if _, res, err := dialSocket(t, must(s.Exec(Want{Stdout: true}, echo(0)))(t), "v9.channel.k8s.io"); err == nil || res.StatusCode != http.StatusForbidden {
		t.Errorf("an unknown version: %v, want 403", err)
	}
	ws, _, err := dialSocket(t, must(s.Exec(Want{Stdout: true}, echo(0)))(t))
	if err != nil {
		t.Fatalf("without a version: %v", err)
	}
	if got, err := messages(ws); err != nil || got[3] != "" {
		t.Errorf("without a version: %q, %v; want no status of a success", got, err)
	}
	_ = ws.Close()
}

// Version 5 can close stdin; the one before cannot, and 255 is a channel like any.
func TestWebSocketClosesStdin(t *testing.T) {
	s := newServer(t, Options{})
	ws, _, err := dialSocket(t, must(s.Exec(Want{Stdin: true, Stdout: true}, echo(0)))(t), "v5.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{"", "\x00one ", "\x00two", "\x09nowhere", "\xff\x09", "\xff", "\xff\x00", "\x00late"} {
		_ = ws.WriteMessage(websocket.BinaryMessage, []byte(m))
	}
	if got, err := messages(ws); err != nil || got[1] != "one two" || decode(t, got[3]).Status != "Success" {
		t.Errorf("%q, %v; want stdin up to its end", got, err)
	}
	_ = ws.Close()
}

// The latest size counts; a size nobody takes blocks nothing.
func TestResize(t *testing.T) {
	s := newServer(t, Options{})
	got := make(chan oci.Size, 1)
	read := make(chan struct{})
	command := func(_ context.Context, st oci.Streams) (int32, error) {
		<-read
		got <- <-st.Resize
		for range st.Resize {
		}
		return 0, nil
	}
	ws, _, err := dialSocket(t, must(s.Exec(Want{Stdin: true, Stdout: true, Terminal: true}, command))(t), "v5.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []string{`{"Width":1,"Height":1}`, `{"Width":2,"Height":2}`, `{"Width":120,"Height":40}`} {
		_ = ws.WriteMessage(websocket.BinaryMessage, append([]byte{4}, m...))
	}
	_ = ws.WriteMessage(websocket.BinaryMessage, []byte{0, 'x'}) // dropped: nobody reads stdin
	time.Sleep(50 * time.Millisecond)
	close(read)
	select {
	case size := <-got:
		if size != (oci.Size{Columns: 120, Rows: 40}) && size.Columns > 2 {
			t.Errorf("size %+v", size)
		}
	case <-time.After(patience):
		t.Error("no size came")
	}
	_ = ws.WriteMessage(websocket.BinaryMessage, []byte("\xff\x04"))
	_ = ws.Close()
	st := open
	c, err := dialSPDY(t, must(s.Exec(Want{Stdout: true, Terminal: true}, func(_ context.Context, st oci.Streams) (int32, error) {
		size := <-st.Resize
		return int32(size.Columns), nil
	}))(t), "v4.channel.k8s.io")
	if err != nil {
		t.Fatal(err)
	}
	all := st(t, c, "error", "stdout", "resize")
	_, _ = io.WriteString(all["resize"], `{"Width":33,"Height":11}`)
	if got := decode(t, readAll(t, all["error"])); got.Details == nil || got.Details.Causes[0].Message != "33" {
		t.Errorf("status %+v, want code 33", got)
	}
	_ = c.Close()
}
