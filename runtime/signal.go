package runtime

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Real-time signals as the C library counts them: the kernel's first two are
// taken by threads.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// signalAliases are second names of signals.
var signalAliases = map[string]string{"CLD": "CHLD", "IOT": "ABRT", "POLL": "IO"}

// stopSignal is the name of a container's stop signal: the config's, else the
// image's, else SIGTERM. An image's signal that cannot be read is refused.
func stopSignal(config cri.Signal, img string) (string, error) {
	name, whose := img, "image StopSignal"
	if config != cri.Signal_SIGNAL_RUNTIME_DEFAULT {
		name, whose = strings.TrimPrefix(config.String(), "SIGNAL_"), "stop_signal"
	}
	if name == "" {
		return "SIGTERM", nil
	}
	if _, err := signalNumber(name); err != nil {
		return "", fmt.Errorf("%w: %s %q: %w", errInvalid, whose, name, err)
	}
	return name, nil
}

// signalNumber reads "15", "TERM", "SIGTERM", "SIGRTMIN+3", "RTMAX-2" and CRI's
// form SIGRTMINPLUS3, SIGRTMAXMINUS2.
func signalNumber(name string) (syscall.Signal, error) {
	if n, err := strconv.Atoi(name); err == nil {
		if n < 1 || n > sigRTMax {
			return 0, fmt.Errorf("no signal %d", n)
		}
		return syscall.Signal(n), nil
	}
	s := strings.TrimPrefix(strings.ToUpper(name), "SIG")
	s = strings.NewReplacer("PLUS", "+", "MINUS", "-").Replace(s)
	if rest, ok := strings.CutPrefix(s, "RTMIN"); ok {
		return realTime(sigRTMin, rest)
	}
	if rest, ok := strings.CutPrefix(s, "RTMAX"); ok {
		return realTime(sigRTMax, rest)
	}
	if other, ok := signalAliases[s]; ok {
		s = other
	}
	if n := unix.SignalNum("SIG" + s); n != 0 {
		return n, nil
	}
	return 0, fmt.Errorf("no signal %q", name)
}

func realTime(base int, offset string) (syscall.Signal, error) {
	n := 0
	if offset != "" {
		var err error
		if n, err = strconv.Atoi(offset); err != nil {
			return 0, fmt.Errorf("no real-time signal at %q", offset)
		}
	}
	if base+n < sigRTMin || base+n > sigRTMax {
		return 0, fmt.Errorf("no real-time signal %d", base+n)
	}
	return syscall.Signal(base + n), nil
}

// criSignal is the enum value of a stop signal's name. Of two names of one
// signal (SIGCHLD, SIGCLD) it is the one that was given, else the lower value.
func criSignal(name string) cri.Signal {
	if value, ok := cri.Signal_value["SIGNAL_"+name]; ok {
		return cri.Signal(value)
	}
	n, err := signalNumber(name)
	if err != nil {
		return cri.Signal_SIGNAL_RUNTIME_DEFAULT
	}
	for value := range int32(len(cri.Signal_name)) {
		if m, err := signalNumber(strings.TrimPrefix(cri.Signal_name[value], "SIGNAL_")); err == nil && m == n {
			return cri.Signal(value)
		}
	}
	return cri.Signal_SIGNAL_RUNTIME_DEFAULT
}
