// Package image keeps the node's images: it pulls and imports them, holds
// their records, and says what they take on disk.
//
// It owns everything below its root directory (Options.Root). It does not own
// mounts (package rootfs), nor what a container does with an image. It never
// logs: progress that nobody waits for is dropped, errors are returned.
//
// Terms:
//   - image id: the digest of the config, "sha256:…", everywhere.
//   - artifact: an image in all but its blobs, which are files to be mounted, and
//     its id, which is its manifest's digest.
//   - layer: an unpacked filesystem change, known by its diffID, the digest of
//     the uncompressed tar. It is fetched once and stored once.
//   - variant: a layer that had to take something over from the layers below
//     it (package layer, Plan) is stored apart from the same diffID on other
//     layers. Nearly every layer has one variant, the pristine one.
//   - blob: bytes by digest as a registry has them; only manifests and configs
//     are kept, layers just when Options.KeepLayerBlobs says so.
//   - pull: one run of fetching an image. Callers who want the same image with
//     the same credentials share one; it ends when the last of them has gone.
//   - leftovers: what a broken pull has fetched, kept for the next one within
//     bounds of age and size: beginnings of layers, and whole layers that no
//     image uses.
//   - held: an image that a container uses. Removing it takes its names away
//     at once and its layers when the last container lets go.
//
// Files below Root:
//
//	refs.json            every image: names, digests, layers (written aside, renamed)
//	refs.durable.json    a copy of the last refs.json that is surely on disk, or on a
//	                     full disk a second name of it
//	refs.json.broken     the last refs.json that a start could not read
//	refs.reserve         room for the records of a removal on a full disk
//	lost.json            images whose layers are unpacked again from kept blobs
//	preloaded.json       archives of a preload directory that were imported
//	blobs/sha256/<hex>   manifests and configs
//	layers/<n>/diff/     a layer; layer.json beside it says which, and whether it is durable,
//	                     files what is in it, for Check
//	staging/             what is being unpacked; emptied at start
//	partial/<boot id>/   beginnings of layers that broken pulls left for the next
//	trash/               what is being deleted
//
// Nobody waits for the disk. A background syncfs follows each change; then the
// layers are marked durable. After a reboot (another boot id) a layer without
// the mark is dropped, with the images that need it: the image is absent and
// can be pulled, and never present with empty files. Where its layers are kept as
// they were fetched, they are unpacked again from those, and the image is back
// without a pull.
package image
