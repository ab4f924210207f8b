// Package fetch reads layers from registries: a blob by its digest, from a byte
// on, from whichever endpoint has it, with patience that is bounded.
//
// It owns the continuing of streams that break, and the clock. It does not own
// connections, nor which endpoints there are: a Source does. It verifies no
// digest: whoever reads the whole stream does, and that covers every byte
// whatever endpoint and connection it came by. It never logs, and keeps nothing
// on disk.
//
// Terms:
//   - source: the registry's endpoints, see package registries.
//   - part: one answer to one request: the bytes of a blob from some byte on.
//   - break: a part that ends before its time. The next part goes on from
//     there, so the reader of the stream does not notice.
//   - guard: the clock for a registry that sends nothing, or next to nothing.
//     It stands still while nobody reads.
//
// A registry is asked with Range (RFC 9110, section 14) where bytes are here
// already. One that answers with the whole blob is read and the bytes that are
// here are passed over. If-Range is not sent: the digest names the content, so
// there is no other version to guard against, and mirrors differ in their ETags.
package fetch
