//go:build hold

// Command hold keeps modules in go.mod until code uses them.
package main

import (
	_ "github.com/containerd/nri/pkg/stub"
	_ "github.com/gorilla/websocket"
	_ "k8s.io/client-go/tools/portforward"
	_ "k8s.io/client-go/tools/remotecommand"
	_ "k8s.io/cri-client/pkg"
)

func main() {}
