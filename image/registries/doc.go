// Package registries fetches manifests and blobs from registries: it knows
// which endpoints stand for a name, how to talk to each of them, and when to
// ask the next one.
//
// It owns the reading of containers-registries.conf(5) with its drop-ins,
// certs.d, hosts.toml and containers-auth.json(5), the requests, the retries
// and the tokens. It does not own what is fetched: whoever asks checks blobs,
// unpacks and stores. It logs nothing and keeps nothing on disk or from one
// Source to the next, so a changed file counts for the next pull, and a broken
// one fails it.
//
// Terms:
//   - upstream: the registry that a name says.
//   - endpoint: one place to fetch a name from, a mirror or the upstream, with
//     everything needed to talk to it.
//   - Source: the endpoints of one name during one pull.
//   - login: what an endpoint is told about who asks.
//
// Files that are read, never written:
//
//	Config.RegistriesConf, <it>.d/*.conf   endpoints by prefix, short names
//	Config.HostsDir/<host>/hosts.toml      endpoints by host, as containerd has them
//	Config.CertsDir/<host>/                *.crt authorities, *.cert and *.key pairs
//	Config.AuthFile                        logins by registry or repository
//
// Errors of this package hold no password, no token, no header of a
// configuration and no query string.
package registries
