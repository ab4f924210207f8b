package main

import "strings"

// The table of all that the daemon can be asked for. A test compares it with the
// services' descriptions and with the source, so that nothing new goes unseen.

// These are the gRPC services, as a full method name begins.
const (
	runtimeService = "runtime.v1.RuntimeService/"
	imageService   = "runtime.v1.ImageService/"
	adminService   = "berth.v1.Admin/"
)

// readers are the RPCs that change nothing.
var readers = map[string][]string{
	runtimeService: {"Version", "PodSandboxStatus", "ListPodSandbox", "StreamPodSandboxes", "ListContainers", "StreamContainers", "ContainerStatus",
		"ContainerStats", "ListContainerStats", "StreamContainerStats", "PodSandboxStats", "ListPodSandboxStats", "StreamPodSandboxStats",
		"Status", "GetContainerEvents", "ListMetricDescriptors", "ListPodSandboxMetrics", "StreamPodSandboxMetrics", "RuntimeConfig"},
	imageService: {"ListImages", "StreamImages", "ImageStatus", "ImageFsInfo"},
	adminService: {"ListImages", "InspectImage", "DiskUsage", "Pulls", "Why"},
}

// changers are the RPCs that change something. Each is in a life (see lives).
var changers = map[string][]string{
	runtimeService: {"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox", "CreateContainer", "StartContainer", "StopContainer", "RemoveContainer",
		"UpdateContainerResources", "UpdatePodSandboxResources", "ReopenContainerLog", "ExecSync", "Exec", "Attach", "PortForward",
		"UpdateRuntimeConfig", "CheckpointContainer", "CheckpointPod", "RestorePod"},
	imageService: {"PullImage", "RemoveImage"},
	adminService: {"PinImage", "ImportImage", "ExportImage", "RemoveImage", "CheckImages"},
}

// operations are the steps of the RPCs that work in steps, and of a daemon's start:
// Restore is what lists wait for, Tidy undoes what the daemon before has half made.
var operations = map[string][]string{
	"RunPodSandbox": {"make the log directory", "plan network", "write record", "write pod files", "pin namespaces", "mount shm", "network setup", "open host ports",
		"start pause", "ask NRI plugins", "write ready record"},
	"StopPodSandbox": {"wait for the pod's lock", "stop containers", "tell NRI plugins", "stop pause", "network teardown", "release namespaces"},
	"RemovePodSandbox": {"wait for the pod's lock", "stop containers", "tell NRI plugins", "stop pause", "network teardown", "release namespaces", "remove containers",
		"remove cgroup", "remove record", "stop the container", "wait for the container's lock", "delete in the OCI runtime",
		"unmount rootfs and image volumes", "remove the container's record"},
	"CreateContainer": {"find image", "ask the signature policy", "write record", "mount rootfs", "mount image volumes",
		"resolve users, devices, mounts", "relabel volumes", "make spec", "look at CDI files", "ask NRI plugins", "write bundle", "make the log's directory",
		"create in the OCI runtime", "write created record"},
	"StartContainer": {"wait for the container's lock", "start in the OCI runtime"},
	"StopContainer":  {"wait for the container's lock", "signal and wait for the grace period", "kill what is left", "kill", "tell NRI plugins"},
	"RemoveContainer": {"stop the container", "wait for the container's lock", "delete in the OCI runtime", "unmount rootfs and image volumes",
		"remove the container's record"},
	"ExecSync":            {"run the command"},
	"Exec":                {"streaming session"},
	"PullImage":           {"look at the configuration of registries"},
	"Attach":              {"streaming session"},
	"PortForward":         {"connect to the port"},
	"CheckpointContainer": {"freeze the container", "write its state", "write the archive"},
	"CheckpointPod":       {"write record", "freeze the pod", "write its state"},
	"RestorePod": {"make the log directory", "plan network", "write record", "write pod files", "pin namespaces", "mount shm", "network setup", "write ready record",
		"find image", "ask the signature policy", "mount rootfs", "mount image volumes", "unpack files of the checkpoint", "resolve users, devices, mounts",
		"relabel volumes", "make spec", "look at CDI files", "ask NRI plugins", "write bundle", "take over the checkpoint"},
	"Restore": {"look at records and images", "adopt containers", "settle what a reboot ended", "restore host ports",
		"ask the OCI runtimes what they can do"},
	"Tidy": {"remove what was half made", "remove containers of lost pods", "give back networks", "collect networks", "sweep leftovers",
		"end plugins and commands", "stop the container", "wait for the container's lock", "delete in the OCI runtime", "unmount rootfs and image volumes",
		"remove the container's record", "stop containers", "tell NRI plugins", "stop pause", "network teardown", "release namespaces",
		"remove containers", "remove cgroup", "remove record"},
	"Preload": {"import archives"},
}

// seldom are steps that no life reaches by itself, with where they are tried.
var seldom = map[string]string{
	"remove what an earlier attempt left": "reached by the repetition of a request whose undoing failed",
	"write the checkpoint":                "reached where others serve the directory, which package sandbox/outside tries",
}

// untried are the verbs, and RPCs, of the table that no life calls where checkpoints
// are not possible: they need CRIU, which most machines for tests cannot run.
var untried = []string{"CheckpointContainer", "CheckpointPod", "RestorePod"}

// reads tells whether an RPC, by its full name, changes nothing. What is no RPC is
// an operation, which changes something.
func reads(rpc string) bool {
	for service, methods := range readers {
		if method, ok := strings.CutPrefix(rpc, service); ok {
			for _, m := range methods {
				if m == method {
					return true
				}
			}
		}
	}
	return false
}
