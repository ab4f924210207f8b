package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (l *life) logPath(b *box) string {
	return filepath.Join(l.config.GetLogDirectory(), b.config.GetLogPath())
}

// rotate moves a log away and has the next lines go to a new one, as the kubelet
// does.
func (l *life) rotate(ctx context.Context, b *box) error {
	path := l.logPath(b)
	b.rotated++
	if err := os.Rename(path, fmt.Sprintf("%s.%d", path, b.rotated)); err != nil {
		return fmt.Errorf("rotate a log: %w", err)
	}
	err := l.request(ctx, "ReopenContainerLog", func(ctx context.Context) error {
		_, err := l.rt.ReopenContainerLog(ctx, &cri.ReopenContainerLogRequest{ContainerId: b.id})
		return err
	})
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("after ReopenContainerLog: %w", err)
	}
	return nil
}

// logs reads the logs of a pod that was removed, line by line over all
// rotations, and removes them.
func (l *life) logs(context.Context) error {
	for _, b := range l.boxes {
		if b.kind == greedy {
			continue
		}
		if err := l.log(b); err != nil {
			return fmt.Errorf("log of %s, rotated %d times: %w", b.name, b.rotated, err)
		}
	}
	return os.RemoveAll(l.config.GetLogDirectory())
}

func (l *life) log(b *box) error {
	next := 0
	for i := 1; i <= b.rotated+1; i++ {
		path := l.logPath(b)
		if i <= b.rotated {
			path = fmt.Sprintf("%s.%d", path, i)
		}
		if err := readLog(path, b.kind == cat, &next); err != nil {
			return err
		}
	}
	l.count("log read", 0)
	switch {
	case b.kind == short && next != b.lines:
		return fmt.Errorf("%d lines, want %d", next, b.lines)
	case next == 0:
		return errors.New("it is empty")
	}
	return nil
}

// readLog reads one file, in which the numbers from next on stand, one a line.
// What other lines say was checked by who caused them. Only the log's last line
// may be a part, of a container that was killed.
func readLog(path string, chatty bool, next *int) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) && *next > 0 {
		return nil // a crash between the rotation and the new file's first line
	}
	if err != nil {
		return err
	}
	defer f.Close()
	torn := ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		part := strings.SplitN(lines.Text(), " ", 4)
		if torn != "" {
			return fmt.Errorf("%q is followed by %q", torn, lines.Text())
		}
		switch {
		case len(part) != 4 || part[1] != "stdout":
			return fmt.Errorf("%q where line %d should be", lines.Text(), *next)
		case part[2] == "P":
			torn = lines.Text()
		case chatty && strings.HasPrefix(part[3], "got "):
		case part[2] == "F" && part[3] == strconv.Itoa(*next):
			*next++
		default:
			return fmt.Errorf("%q where line %d should be", lines.Text(), *next)
		}
	}
	return nil
}
