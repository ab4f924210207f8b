// Package nri lets NRI plugins see, adjust and update pods and containers,
// through the adaptation of github.com/containerd/nri.
//
// It owns the connection to the plugins (those it launches from a directory and
// those that come to the socket), the translation between berth's data and
// NRI's, the application of a plugin's adjustments to a specification, and the
// promise that a plugin which connects late misses nothing. It does not own any
// pod or container: what it must know or change it asks of a Node.
//
// Terms: a hook is one method of Plugins that a flow calls, named after NRI's
// event. A pod or container is born from its first hook until its record shows
// it (Settled); it counts as existing meanwhile, though no list has it.
//
// Synchronisation: a hook and a plugin's synchronisation exclude each other, so
// each object is either in what a new plugin is given or told to it by hooks.
// That exclusion is held while plugins answer, which each does within its
// timeout or is dropped, and never while anything else is waited for.
//
// Locks: hooks may be called with the lock of the object they speak of. Updates
// that plugins ask of other containers take those containers' locks, in the
// order in which they were asked, and never while a hook holds off a
// synchronisation.
//
// On disk: the socket; the plugins' binaries and configuration are read only.
package nri
