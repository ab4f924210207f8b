package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestConfigHasExtraLinesInTheirTable(t *testing.T) {
	n := &Node{Dir: "/d", Socket: "/d/s", ConfDir: "/d/net.d", Bin: "/b", Deps: "/deps",
		options: Options{Settings: map[string]string{"image": "pinned = [\"x\"]", "": "x = 1"}}}
	text := n.config()
	for _, want := range []string{"root = \"/d/root\"", "x = 1\n\n[cni]", "[image]\nregistries_conf = \"/d/registries.conf\"\npinned = [\"x\"]\n", "log_level = \"debug\""} {
		if !strings.Contains(text, want) {
			t.Errorf("the configuration lacks %q:\n%s", want, text)
		}
	}
}

func TestRegistriesPointAtTheMirror(t *testing.T) {
	n := &Node{options: Options{Mirror: "127.0.0.1:7"}}
	if text := n.registries(); strings.Count(text, `location = "127.0.0.1:7"`) != 6 || !strings.Contains(text, `prefix = "registry.k8s.io"`) {
		t.Errorf("registries.conf:\n%s", text)
	}
	if text := (&Node{}).registries(); text != "" {
		t.Errorf("without a mirror registries.conf is %q", text)
	}
}

func TestConflistIsOneNetworkOfTheNode(t *testing.T) {
	n := &Node{Bridge: "bt1-1", Subnet: "10.88.1.0/24", Leases: "/d/leases"}
	var list struct {
		Plugins []struct {
			Type   string
			Bridge string
			IPAM   struct{ DataDir string }
		}
	}
	if err := json.Unmarshal([]byte(n.Conflist()), &list); err != nil {
		t.Fatal(err)
	}
	if len(list.Plugins) != 2 || list.Plugins[0].Bridge != "bt1-1" || list.Plugins[0].IPAM.DataDir != "/d/leases" || list.Plugins[1].Type != "portmap" {
		t.Errorf("conflist %+v", list)
	}
}

func TestUnreadyNamesTheCondition(t *testing.T) {
	status := &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{
		{Type: cri.RuntimeReady, Status: true}, {Type: cri.NetworkReady, Reason: "NoConfig", Message: "none found"},
	}}
	if err := (&Node{}).unready(status); err == nil || !strings.Contains(err.Error(), "NetworkReady is false: NoConfig: none found") {
		t.Errorf("unready: %v", err)
	}
	if err := (&Node{options: Options{NoCNI: true}}).unready(status); err != nil {
		t.Errorf("a node without CNI waits for the network: %v", err)
	}
}

func TestLocateNeedsEveryBinary(t *testing.T) {
	bin, deps := t.TempDir(), t.TempDir()
	t.Setenv("BERTH_BIN", bin)
	t.Setenv("BERTH_DEPS", deps)
	files := []string{bin + "/berth", bin + "/berth-monitor", deps + "/bin/runc", deps + "/bin/crictl", deps + "/cni/bridge"}
	for _, f := range files {
		if err := os.MkdirAll(filepath.Dir(f), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f, nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := locate(); err != nil {
		t.Fatal(err)
	}
	for _, f := range slices.Backward(files) {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
		if _, _, err := locate(); err == nil || !strings.Contains(err.Error(), f) {
			t.Errorf("without %s: %v", f, err)
		}
	}
}
