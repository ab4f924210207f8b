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
	manager, shelved := takeSystemd()
	notify := manager.tell
	if len(shelved) > 0 {
		t.Errorf("without LISTEN_FDS there is %v", shelved)
	}
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
	if err := manager.Drop("a.1"); err != nil {
		t.Fatal(err)
	}
	if n, err := l.Read(buf); err != nil || string(buf[:n]) != "FDSTOREREMOVE=1\nFDNAME=a.1" {
		t.Errorf("systemd got %q, %v", buf[:n], err)
	}
	l.Close()
	if err := notify("STOPPING=1"); err == nil || !strings.Contains(err.Error(), "tell systemd") {
		t.Errorf("without a listener: %v", err)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if manager, _ := takeSystemd(); manager.tell("READY=1") != nil || manager.shelf() != nil {
		t.Error("without systemd there is somebody to tell, or a store")
	}
}

// Descriptors for another process are not ours to close.
func TestDescriptorsForAnotherProcess(t *testing.T) {
	t.Setenv("LISTEN_PID", "1")
	t.Setenv("LISTEN_FDS", "2")
	t.Setenv("LISTEN_FDNAMES", "a:b")
	if _, shelved := takeSystemd(); len(shelved) > 0 {
		t.Errorf("what process 1 was passed: %v", shelved)
	}
	if _, ok := os.LookupEnv("LISTEN_FDS"); ok {
		t.Error("LISTEN_FDS is still in the environment, for children to find")
	}
}
