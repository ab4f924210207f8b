package main

import (
	"log"
	"os"

	"berth/sandbox/outside"
)

// look answers the daemon's questions about paths until it hangs up.
func look() {
	if err := outside.Serve(os.Stdin, os.Stdout); err != nil {
		log.Fatalf("berth-monitor look: %v", err)
	}
	os.Exit(0)
}
