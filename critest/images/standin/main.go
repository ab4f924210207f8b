// Command standin is the one static program inside the test images. The name
// it is started by decides what it is:
//
//	nginx            HTTP on :80; titled "nginx: master process"; /var/run/nginx.pid
//	hostnet-nginx    HTTP on :12003
//	httpd-foreground HTTP on :80; logs a line with httpd
//	nnp              prints its effective user id
//	pause            sleeps until SIGTERM or SIGINT
package main

import (
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// title is what critest looks for in the command line of nginx.
const title = "nginx: master process nginx -g daemon off;"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	switch name := filepath.Base(os.Args[0]); {
	case os.Args[0] == title:
		if err := os.WriteFile("/var/run/nginx.pid", []byte(strconv.Itoa(os.Getpid())+"\n"), 0o644); err != nil {
			return err
		}
		return serve(":80", "nginx")
	case name == "nginx":
		// Executed again by path, so that the process keeps the name nginx
		// and gets a title as its arguments.
		self, err := os.Executable()
		if err != nil {
			return err
		}
		return syscall.Exec(self, []string{title}, os.Environ())
	case name == "hostnet-nginx":
		return serve(":12003", "nginx")
	case strings.HasPrefix(name, "httpd"):
		fmt.Println("httpd: ready for requests")
		return serve(":80", "httpd")
	case name == "nnp":
		fmt.Printf("Effective uid: %d\n", os.Geteuid())
		return nil
	case name == "pause":
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
		<-stop
		return nil
	default:
		return fmt.Errorf("standin: no part called %q", name)
	}
}

// serve answers every request until SIGTERM or SIGQUIT.
func serve(address, name string) error {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGINT)
	go func() {
		<-stop
		os.Exit(0)
	}()
	return http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Printf("%s: %s %s\n", name, r.Method, r.URL.Path)
		host, err := os.Hostname()
		if err != nil {
			host = "an unnamed host"
		}
		fmt.Fprintf(w, "hello from %s in pod %s\n", name, host)
	}))
}
