// Package policy decides whether an image may be used: at a pull by the
// signatures that were read with it, later by those that were kept, without any
// network. Both ask the same question in the same way.
//
// It owns no state but verdicts in memory, and no files but short-lived ones in
// a scratch directory that the caller gives and cleans. Policy files
// (containers-policy.json(5)) are the operator's; they are read at every
// question, so that a change counts at once. What they say is interpreted by
// containers/image.
//
// Terms:
//   - policy file: the default one, or DIR/NAMESPACE.json for the pods of one
//     namespace. There is no way from a file that cannot be used to another: what
//     it would decide is refused, naming the file.
//   - subject: an image under one name, with the manifests that lead to it and
//     their signatures. An index speaks for what it points to: a signature of the
//     index or of the image's own manifest will do.
//   - signature: as containers/image writes it to its "dir:" form, either a simple
//     signature (OpenPGP message) or a sigstore one with a header of its own.
package policy
