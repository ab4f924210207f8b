package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// floor does by hand what a pod's life cannot do without: the plugins of the
// node's network and runc with the very bundle that berth made.
func (b *bench) floor(ctx context.Context, round int) error {
	name := fmt.Sprintf("floor%d-%d", os.Getpid(), round)
	// Pinned below the node's folder: `ip netns` would leave a mount of its own.
	netns := filepath.Join(b.node.Dir, name)
	if err := os.WriteFile(netns, nil, 0o600); err != nil {
		return fmt.Errorf("make a file for a network namespace: %w", err)
	}
	if err := command(ctx, "unshare", "--net="+netns, "true"); err != nil {
		return err
	}
	err := b.timed("CNI ADD", func() error { return b.plugins(ctx, "ADD", name, netns) })
	if err == nil {
		err = b.timed("CNI DEL", func() error { return b.plugins(ctx, "DEL", name, netns) })
	}
	if uerr := syscall.Unmount(netns, syscall.MNT_DETACH); err == nil && uerr != nil {
		err = fmt.Errorf("unmount a network namespace: %w", uerr)
	}
	if err != nil {
		return err
	}
	return b.runc(ctx, name)
}

// command runs a program; the error has what it said.
func command(ctx context.Context, name string, args ...string) error {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// plugins calls every plugin of the node's network as libcni would.
func (b *bench) plugins(ctx context.Context, verb, id, netns string) error {
	var list struct {
		CNIVersion string
		Name       string
		Plugins    []map[string]any
	}
	if err := json.Unmarshal([]byte(b.node.Conflist()), &list); err != nil {
		return fmt.Errorf("read the network: %w", err)
	}
	if verb == "DEL" {
		list.Plugins[0], list.Plugins[1] = list.Plugins[1], list.Plugins[0]
	}
	var previous json.RawMessage
	for _, p := range list.Plugins {
		p["cniVersion"], p["name"] = list.CNIVersion, list.Name
		if previous != nil {
			p["prevResult"] = previous
		}
		input, err := json.Marshal(p)
		if err != nil {
			return fmt.Errorf("encode a plugin's input: %w", err)
		}
		plugin, ok := p["type"].(string)
		if !ok {
			return fmt.Errorf("a plugin of the network has no type: %v", p)
		}
		cmd := exec.CommandContext(ctx, filepath.Join(b.node.Deps, "cni", plugin))
		cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID="+id, "CNI_NETNS="+netns, "CNI_IFNAME=eth0",
			"CNI_PATH="+filepath.Join(b.node.Deps, "cni"))
		cmd.Stdin = bytes.NewReader(input)
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("plugin %v %s: %w: %s", p["type"], verb, err, out)
		}
		if verb == "ADD" {
			previous = out
		}
	}
	return nil
}

// runc runs the bundle of a container that berth made and stopped short of
// starting, under another name and cgroup.
func (b *bench) runc(ctx context.Context, name string) error {
	config := b.pod(name)
	pod, err := b.rt.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	if err != nil {
		return err
	}
	defer func() {
		_, _ = b.rt.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()}) // Close reports what is left
		_, _ = b.rt.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: pod.GetPodSandboxId()})
	}()
	made, err := b.rt.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.GetPodSandboxId(), Config: container(), SandboxConfig: config})
	if err != nil {
		return err
	}
	bundle := filepath.Join(b.node.State(), "containers", made.GetContainerId())
	raw, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return fmt.Errorf("read the bundle: %w", err)
	}
	own := filepath.Join(b.node.Dir, "floor", name)
	if err := os.MkdirAll(own, 0o700); err != nil {
		return fmt.Errorf("make a bundle: %w", err)
	}
	raw = bytes.ReplaceAll(raw, []byte(made.GetContainerId()), []byte(name))
	raw = bytes.ReplaceAll(raw, []byte(filepath.Join(b.node.State(), "containers", name)), []byte(bundle))
	if err := os.WriteFile(filepath.Join(own, "config.json"), raw, 0o600); err != nil {
		return fmt.Errorf("write a bundle: %w", err)
	}
	runc := filepath.Join(b.node.Deps, "bin", "runc")
	root := []string{"--root", filepath.Join(b.node.Dir, "floor-runc")}
	do := func(what string, args ...string) error {
		return b.timed(what, func() error {
			cmd := exec.CommandContext(ctx, runc, append(root, args...)...)
			if out, err := cmd.Output(); err != nil { // no pipe to stderr: the container would keep it open
				return fmt.Errorf("runc %v: %w: %s", args, err, out)
			}
			return nil
		})
	}
	if err := b.timed("runc create", func() error { return b.create(ctx, runc, append(root, "create", "--bundle", own, name)) }); err != nil {
		return err
	}
	if err := do("runc start", "start", name); err != nil {
		return err
	}
	if err := do("runc exec", "exec", name, "true"); err != nil {
		return err
	}
	return b.timed("runc kill, delete", func() error {
		if err := command(ctx, runc, append(root, "kill", name, "KILL")...); err != nil {
			return err
		}
		for {
			if err := command(ctx, runc, append(root, "delete", name)...); err == nil || ctx.Err() != nil {
				return ctx.Err()
			}
		}
	})
}

// create runs runc create with the container's streams on /dev/null.
func (b *bench) create(ctx context.Context, runc string, args []string) error {
	cmd := exec.CommandContext(ctx, runc, append([]string{"--log", filepath.Join(b.node.Dir, "floor.log")}, args...)...)
	if err := cmd.Run(); err != nil {
		log, _ := os.ReadFile(filepath.Join(b.node.Dir, "floor.log")) // a better text than the status, when there is one
		return fmt.Errorf("runc create: %w: %s", err, log)
	}
	return nil
}
