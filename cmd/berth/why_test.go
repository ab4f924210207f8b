package main

import (
	"bytes"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"berth/runtime/admin"
)

func TestWhyTable(t *testing.T) {
	for name, tc := range map[string]struct {
		reply admin.WhyReply
		want  []string
	}{
		"nothing": {admin.WhyReply{}, []string{"No operation runs."}},
		"all": {admin.WhyReply{
			Operations: []admin.WhyOperation{{Verb: "RunPodSandbox", Object: "web_ns_uid_0", Seconds: 12.1, Step: "network setup", StepSeconds: 12,
				Waits: []admin.WhyWait{{PID: 77, What: "CNI plugin bridge ADD", State: "D", Channel: "rpc_wait_bit_killable"}}}},
			Objects: []admin.WhyObject{{Kind: "container", ID: "0123456789abcdef", Name: "c", State: "exited", Reason: "Error, exit code 3",
				Failed: &admin.WhyFailure{Verb: "StartContainer", Step: "start", Error: "no such program", At: time.Unix(0, 0)}}},
		}, []string{"RunPodSandbox 12s network setup 12s web_ns_uid_0", "CNI plugin bridge ADD, pid 77 state D at rpc_wait_bit_killable",
			"container 0123456789ab is exited: c", "Error, exit code 3", `StartContainer failed at`, `step "start": no such program`}},
	} {
		var out bytes.Buffer
		w := tabwriter.NewWriter(&out, 0, 0, 1, ' ', 0)
		whyTable(w, &tc.reply)
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		text := strings.Join(strings.Fields(out.String()), " ")
		for _, words := range tc.want {
			if !strings.Contains(text, words) {
				t.Errorf("%s: no %q in\n%s", name, words, out.String())
			}
		}
	}
}
