package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"time"
)

// errMonitor: qemu refused a command of its monitor, or its answer cannot be read.
var errMonitor = errors.New("qemu's monitor")

// qmp speaks qemu's machine protocol. It is for one goroutine.
type qmp struct {
	conn    net.Conn
	answers *json.Decoder
}

// newQMP takes over the connection and reads the greeting.
func newQMP(conn net.Conn) (*qmp, error) {
	q := &qmp{conn: conn, answers: json.NewDecoder(conn)}
	var greeting struct{ QMP json.RawMessage }
	if err := q.answers.Decode(&greeting); err != nil {
		return nil, fmt.Errorf("%w: read the greeting: %w", errMonitor, err)
	}
	return q, q.do("qmp_capabilities", nil, nil)
}

// do runs one command, passes over events and stores what came back in result,
// unless that is nil.
func (q *qmp) do(command string, arguments map[string]any, result any) error {
	request := map[string]any{"execute": command}
	if arguments != nil {
		request["arguments"] = arguments
	}
	if err := json.NewEncoder(q.conn).Encode(request); err != nil {
		return fmt.Errorf("%w: send %s: %w", errMonitor, command, err)
	}
	for {
		var answer struct {
			Return json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := q.answers.Decode(&answer); err != nil {
			return fmt.Errorf("%w: read the answer to %s: %w", errMonitor, command, err)
		}
		switch {
		case answer.Error != nil:
			return fmt.Errorf("%w: %s: %s", errMonitor, command, answer.Error.Desc)
		case answer.Return == nil:
			continue // an event
		case result == nil:
			return nil
		}
		if err := json.Unmarshal(answer.Return, result); err != nil {
			return fmt.Errorf("%w: read the answer to %s: %w", errMonitor, command, err)
		}
		return nil
	}
}

// transfer starts a migration in one direction, "migrate" or "migrate-incoming",
// of everything but the memory, and waits for its end.
func (q *qmp) transfer(command, shell string) error {
	capability := map[string]any{"capability": "x-ignore-shared", "state": true}
	if err := q.do("migrate-set-capabilities", map[string]any{"capabilities": []any{capability}}, nil); err != nil {
		return err
	}
	if err := q.do(command, map[string]any{"uri": "exec:" + shell}, nil); err != nil {
		return err
	}
	for range 3000 {
		var info struct {
			Status string
			Desc   string `json:"error-desc"`
		}
		if err := q.do("query-migrate", nil, &info); err != nil {
			return err
		}
		switch info.Status {
		case "completed":
			return nil
		case "failed", "cancelled":
			return fmt.Errorf("%w: %s %s: %s", errMonitor, command, info.Status, info.Desc)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("%w: %s does not end", errMonitor, command)
}
