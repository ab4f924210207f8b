package main

import (
	"crypto/tls"
	"flag"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"k8s.io/klog/v2"

	"berth/runtime/config"
	"berth/runtime/streaming"

	"berth/sandbox/regular/keypair"
)

// certificate is a key pair that is read again when its files have changed.
type certificate struct {
	cert, key string
	pair      atomic.Pointer[tls.Certificate]
}

// reload reads the files; an error leaves the pair that was read before.
func (c *certificate) reload() error {
	if c == nil {
		return nil
	}
	pair, err := keypair.Read(c.cert, c.key)
	if err != nil {
		return fmt.Errorf("keys \"streaming.tls_cert\" and \"streaming.tls_key\": %w", err)
	}
	c.pair.Store(&pair)
	return nil
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.pair.Load(), nil }

// listenStreams starts the server of exec, attach and port-forward; it serves the
// certificate that it returns, if it serves one.
func listenStreams(c config.Streaming) (*streaming.Server, *certificate, error) {
	o := streaming.Options{Address: net.JoinHostPort(c.Address, strconv.Itoa(c.Port)),
		Lifetime: time.Duration(c.URLLifetime), Idle: time.Duration(c.IdleTimeout)}
	var cert *certificate
	if c.TLSCert != "" {
		cert = &certificate{cert: c.TLSCert, key: c.TLSKey}
		if err := cert.reload(); err != nil {
			return nil, nil, err
		}
		o.TLS = &tls.Config{GetCertificate: cert.get, MinVersion: tls.VersionTLS12}
	}
	s, err := streaming.New(o)
	if err != nil {
		return nil, nil, fmt.Errorf("keys \"streaming.address\" and \"streaming.port\": %w", err)
	}
	return s, cert, nil
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
