package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"k8s.io/klog/v2"

	"berth/runtime/config"
	"berth/runtime/streaming"
)

// listenStreams starts the server of exec, attach and port-forward.
func listenStreams(c config.Streaming) (*streaming.Server, error) {
	o := streaming.Options{Address: net.JoinHostPort(c.Address, strconv.Itoa(c.Port)),
		Lifetime: time.Duration(c.URLLifetime), Idle: time.Duration(c.IdleTimeout)}
	if c.TLSCert != "" {
		pair, err := tls.LoadX509KeyPair(c.TLSCert, c.TLSKey)
		if err != nil {
			return nil, fmt.Errorf("keys \"streaming.tls_cert\" and \"streaming.tls_key\": %w", err)
		}
		o.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
	}
	s, err := streaming.New(o)
	if err != nil {
		return nil, fmt.Errorf("keys \"streaming.address\" and \"streaming.port\": %w", err)
	}
	return s, nil
}

// debugLog takes what libraries say through klog, which is of single clients.
type debugLog struct{ log *logrus.Entry }

func (d debugLog) Write(b []byte) (int, error) {
	d.log.Debug(strings.TrimSpace(string(b)))
	return len(b), nil
}

// quietKlog keeps klog off the daemon's standard error.
func quietKlog(log *logrus.Entry) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	for name, value := range map[string]string{"logtostderr": "false", "one_output": "true", "stderrthreshold": "FATAL", "skip_headers": "true"} {
		if err := flags.Set(name, value); err != nil {
			return fmt.Errorf("set klog's %s: %w", name, err)
		}
	}
	klog.SetOutput(debugLog{log})
	return nil
}
