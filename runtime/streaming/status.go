package streaming

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"

	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

// status is how a command ended, as protocol versions 4 and 5 tell it: the part
// of Kubernetes' metav1.Status that clients read.
type status struct {
	Status  string   `json:"status"`
	Message string   `json:"message,omitempty"`
	Reason  string   `json:"reason,omitempty"`
	Details *details `json:"details,omitempty"`
	Code    int      `json:"code,omitempty"`
}

type details struct {
	Causes []cause `json:"causes"`
}

type cause struct {
	Type    string `json:"reason"`
	Message string `json:"message"`
}

func statusOf(code int32, err error) status {
	switch {
	case err != nil:
		return status{Status: "Failure", Reason: "InternalError", Message: err.Error(), Code: http.StatusInternalServerError}
	case code != 0:
		text := fmt.Sprint(code)
		return status{Status: "Failure", Reason: remotecommand.NonZeroExitCodeReason, Message: "command terminated with exit code " + text,
			Details: &details{Causes: []cause{{Type: remotecommand.ExitCodeCauseType, Message: text}}}}
	default:
		return status{Status: "Success"}
	}
}

// write tells the client on its error stream; older versions than 4 know plain
// text, and only of failures.
func (st status) write(w io.Writer, structured bool) {
	if !structured {
		if st.Message != "" {
			_, _ = io.WriteString(w, st.Message)
		}
		return
	}
	b, _ := json.Marshal(st) // strings and a number cannot fail
	_, _ = w.Write(b)
}
