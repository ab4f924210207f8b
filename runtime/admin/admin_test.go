package admin

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

type request struct {
	Name  string `json:"name"`
	Count int    `json:"count,omitempty"`
}

type reply struct {
	Names []string       `json:"names"`
	Bytes uint64         `json:"bytes"`
	When  time.Time      `json:"when"`
	More  map[string]any `json:"more,omitempty"`
}

// odd has a field that request has not.
type odd struct {
	Name  string `json:"name"`
	Force bool   `json:"force"`
}

const (
	repeat  Method[request, reply] = "Repeat"
	unknown Method[request, reply] = "Unknown"
)

type server struct{}

var when = time.Date(2026, 2, 3, 4, 5, 6, 789, time.UTC)

func (s *server) repeat(_ context.Context, r *request) (*reply, error) {
	if r.Name == "" {
		return nil, status.Error(codes.InvalidArgument, "name is empty")
	}
	return &reply{Names: slices.Repeat([]string{r.Name}, r.Count), Bytes: 1<<53 - 1, When: when, More: map[string]any{"a": []any{"b", nil, 1.5}}}, nil
}

// serve answers on a socket and gives a connection to it.
func serve(t *testing.T, s *server) *grpc.ClientConn {
	t.Helper()
	through := func(ctx context.Context, in any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		out, err := next(ctx, in)
		if errors.Is(err, ErrInvalid) {
			err = status.Error(codes.InvalidArgument, err.Error())
		}
		return out, err
	}
	g := grpc.NewServer(grpc.UnaryInterceptor(through))
	g.RegisterService(Service(Serve(repeat, (*server).repeat)), s)
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go g.Serve(l)
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// What one end says the other hears, to the last digit.
func TestCall(t *testing.T) {
	conn := serve(t, &server{})
	got, err := repeat.Call(t.Context(), conn, request{Name: "ä<&>", Count: 2})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got.Names, []string{"ä<&>", "ä<&>"}) || got.Bytes != 1<<53-1 || !got.When.Equal(when) || len(got.More["a"].([]any)) != 3 {
		t.Errorf("got %+v", got)
	}
	if _, err := repeat.Call(t.Context(), conn, request{}); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "name is empty") {
		t.Errorf("a refusal: %v", err)
	}
	if _, err := unknown.Call(t.Context(), conn, request{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("an unknown method: %v", err)
	}
}

// A demand that the daemon does not know is refused, never dropped.
func TestUnknownDemandIsRefused(t *testing.T) {
	conn := serve(t, &server{})
	_, err := Method[odd, reply]("Repeat").Call(t.Context(), conn, odd{Name: "x", Force: true})
	if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "force") {
		t.Errorf("%v", err)
	}
	// Older ends may leave out what a reply of today has.
	if _, err := Method[request, struct{}]("Repeat").Call(t.Context(), conn, request{Name: "x"}); err != nil {
		t.Errorf("a reply with more: %v", err)
	}
}
