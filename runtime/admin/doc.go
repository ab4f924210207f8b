// Package admin is the wire of the operator's own calls: the gRPC service
// berth.v1.Admin, which the daemon answers on its CRI socket beside CRI's
// services. Whoever may use the socket may use it.
//
// It owns what both ends must agree on: the names of the methods, the types of
// their requests and replies, and how those travel. It does not own what a
// method does (package runtime) nor how an answer is shown (cmd/berth).
//
// A message is a google.protobuf.Struct that holds the JSON form of a Go struct,
// so that no code is generated and any gRPC tool can read it. Its numbers are
// floating-point: whole numbers are exact to 2^53, and a time is a text.
//
// A new verb needs its request and reply type and a constant here, one function
// in package runtime and a line in its table, and a command in cmd/berth.
package admin
