//go:build hold

// Command hold keeps modules in go.mod until code uses them.
package main

import (
	_ "github.com/containerd/nri/pkg/adaptation"
	_ "github.com/containerd/nri/pkg/runtime-tools/generate"
	_ "github.com/coreos/go-systemd/v22/dbus"
	_ "github.com/google/nftables"
	_ "github.com/moby/profiles/apparmor"
	_ "github.com/opencontainers/selinux/go-selinux"
	_ "github.com/opencontainers/selinux/go-selinux/label"
	_ "github.com/vishvananda/netlink"
	_ "tags.cncf.io/container-device-interface/pkg/cdi"
	_ "tags.cncf.io/container-device-interface/pkg/parser"
)

func main() {}
