// Package layer turns one image layer, a tar stream, into an overlay diff
// directory.
//
// It owns: reading tar entries, writing them below one directory, overlay's
// notation for deletions (character device 0:0, trusted.overlay.opaque),
// bounds on what an image may ask for, and what can only be settled when the
// layers below are known (Needs, Plan). It does not own: fetching, decompressing,
// digests, where layers live, mounting.
//
// Terms:
//   - root: the directory the layer is written to. Nothing outside it is ever
//     touched: names are resolved one component at a time from an open
//     directory, and a symlink met on the way is read and followed by this
//     package, with root as "/", never by the kernel.
//   - explicit: a directory with a tar entry of its own; implied: a directory
//     that exists only because an entry lies below it. An implied directory is
//     0755 root:root unless a lower layer has it: then it looks as it does
//     there, see Plan.
//   - cross link: a hard link whose target is in a lower layer.
//
// A layer is unpacked without knowing the layers below it, so layers may be
// unpacked in any order and at the same time. Nothing is synced to disk here.
//
// What an image may hold is decided once: a ".." in a name is refused, a
// leading "/" is dropped, a symlinked parent is followed inside root, a later
// entry of the same name replaces an earlier one, and a whiteout hides lower
// layers only, wherever in its layer it stands.
package layer
