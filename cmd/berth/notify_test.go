package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestNotifyReachesSystemdAndNobodyElse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	notify := takeNotify()
	if _, ok := os.LookupEnv("NOTIFY_SOCKET"); ok {
		t.Error("NOTIFY_SOCKET is still in the environment, for children to find")
	}
	if err := notify("READY=1"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, err := l.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		t.Errorf("systemd got %q, %v", buf[:n], err)
	}
	l.Close()
	if err := notify("STOPPING=1"); err == nil || !strings.Contains(err.Error(), "connect to systemd") {
		t.Errorf("without a listener: %v", err)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if err := takeNotify()("READY=1"); err != nil {
		t.Errorf("without systemd: %v", err)
	}
}
