# berth: build, test, demo. `make help` lists the targets.
# Needs: Debian 12 or alike, root for deps and everything that runs containers, Go.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:

DEPS    := $(or $(BERTH_DEPS),$(CURDIR)/.deps)
STAMPS  := $(DEPS)/stamps
BIN     := $(CURDIR)/bin
VERSION ?= 0.1.0

RUNC_VERSION     := 1.5.3
CNI_VERSION      := 1.10.0
CRITOOLS_VERSION := 1.37.0

APT_PACKAGES := gcc libc6-dev pkg-config libseccomp-dev iptables nftables iproute2 util-linux e2fsprogs strace curl zstd

export BERTH_DEPS  := $(DEPS)
export BERTH_BIN   := $(BIN)
export CGO_ENABLED := 0
# One place for go's flags: pure Go image signatures, no WebAssembly engine for NRI
# plugins (10 % of the binary), no paths of this machine.
export GOFLAGS     := -buildvcs=false -trimpath -tags=containers_image_openpgp,nri_no_wasm

# Tests that need root live in files called *_root_test.go.
ROOT_FILES    = $(shell find . -name '*_root_test.go' -not -path './critest/*' -not -path './.deps/*')
ROOT_TESTS    = ^($(shell cat /dev/null $(ROOT_FILES) | grep -oE '^func (Test|Fuzz)[A-Za-z0-9_]+' | cut -c6- | sort -u | paste -sd'|'))$$
ROOT_PACKAGES = $(sort $(dir $(ROOT_FILES)))

.PHONY: help deps build demo test unit root critest cases crash soak images-real bench golden fuzz guest lint install clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

deps: ## install what a fresh machine lacks, pinned, below .deps (needs root, network)
deps: $(STAMPS)/apt $(STAMPS)/runc-$(RUNC_VERSION) $(STAMPS)/cni-$(CNI_VERSION) $(STAMPS)/critools-$(CRITOOLS_VERSION) $(STAMPS)/busybox $(STAMPS)/debs-small
	@echo "deps: all there (runc $(RUNC_VERSION), CNI plugins $(CNI_VERSION), crictl and critest $(CRITOOLS_VERSION))"

$(STAMPS)/apt: Makefile
	@mkdir -p $(@D)
	missing=()
	for p in $(APT_PACKAGES); do
	  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing+=($$p)
	done
	if (( $${#missing[@]} )); then
	  echo "deps: apt-get install $${missing[*]}"
	  apt-get update -qq
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null
	fi
	touch $@

$(STAMPS)/runc-$(RUNC_VERSION): | $(STAMPS)/apt
	@echo "deps: runc $(RUNC_VERSION)"
	GOBIN=$(DEPS)/bin GOFLAGS=-trimpath CGO_ENABLED=1 go install -tags seccomp \
	  -ldflags '-s -w -X main.version=$(RUNC_VERSION)' github.com/opencontainers/runc@v$(RUNC_VERSION)
	touch $@

$(STAMPS)/cni-$(CNI_VERSION): | $(STAMPS)/apt
	@echo "deps: CNI plugins $(CNI_VERSION)"
	GOBIN=$(DEPS)/cni GOFLAGS=-trimpath go install -ldflags '-s -w' \
	  github.com/containernetworking/plugins/plugins/{main/bridge,main/loopback,main/ptp,main/macvlan,main/ipvlan,main/host-device,main/dummy,ipam/host-local,ipam/static,meta/portmap,meta/firewall,meta/bandwidth,meta/tuning}@v$(CNI_VERSION)
	touch $@

# crictl, ginkgo and the specs come from critest's own module, so its go.sum pins them.
$(STAMPS)/critools-$(CRITOOLS_VERSION): critest/go.mod critest/conformance/suite/suite_test.go | $(STAMPS)/apt
	@echo "deps: crictl and critest $(CRITOOLS_VERSION)"
	cd critest
	GOFLAGS=-trimpath go build -ldflags '-s -w -X sigs.k8s.io/cri-tools/pkg/version.Version=$(CRITOOLS_VERSION)' -o $(DEPS)/bin/crictl sigs.k8s.io/cri-tools/cmd/crictl
	GOFLAGS=-trimpath go build -ldflags '-s -w' -o $(DEPS)/bin/ginkgo github.com/onsi/ginkgo/v2/ginkgo
	GOFLAGS=-trimpath go test -c -ldflags '-s -w' -o $(DEPS)/bin/critest.test ./conformance/suite
	touch $@

# Debian's busybox is unpacked, not installed: it conflicts with busybox-static.
$(STAMPS)/busybox: | $(STAMPS)/apt
	@echo "deps: busybox, for test images"
	mkdir -p $(DEPS)/images/busybox
	tmp=$$(mktemp -d); trap 'rm -rf $$tmp' EXIT
	cd $$tmp
	apt-get download -qq busybox 2>/dev/null || { apt-get update -qq; apt-get download -qq busybox 2>/dev/null; }
	dpkg-deb -x busybox_*.deb $(DEPS)/images/busybox
	touch $@

# Packages that images of realistic shape are made of, see critest/images/debian.go.
DEBS_SMALL  := perl-modules-5.36 tzdata libpython3.11-stdlib
DEBS_COMMON := bash coreutils libc6 dpkg perl-base util-linux python3.11-minimal libpython3.11-minimal \
  libicu72 golang-1.19-src python3-django python3-sympy
DEBS_LARGE  := ghc openjdk-17-jdk-headless openjdk-17-jre-headless chromium libstd-rust-dev

define download
	@mkdir -p $(DEPS)/debs
	cd $(DEPS)/debs
	missing=()
	for p in $(1); do
	  compgen -G "$${p}_*.deb" >/dev/null || missing+=($$p)
	done
	if (( $${#missing[@]} )); then
	  echo "deps: apt-get download $${missing[*]}"
	  apt-get download -qq "$${missing[@]}" 2>/dev/null || { apt-get update -qq; apt-get download -qq "$${missing[@]}" 2>/dev/null; }
	fi
	touch $@
endef

$(STAMPS)/debs-small: | $(STAMPS)/apt
	$(call download,$(DEBS_SMALL))

$(STAMPS)/debs-common: | $(STAMPS)/debs-small
	$(call download,$(DEBS_COMMON))

$(STAMPS)/debs-large: | $(STAMPS)/debs-common
	$(call download,$(DEBS_LARGE))

# The peer of the pull benchmark: `make bench PEERS=containerd`. igzip and unpigz
# are kept from it there.
CONTAINERD_VERSION := 2.4.2
$(STAMPS)/containerd-$(CONTAINERD_VERSION):
	@echo "deps: containerd $(CONTAINERD_VERSION)"
	GOBIN=$(DEPS)/peers GOFLAGS=-trimpath go install -tags 'no_btrfs no_devmapper no_zfs' \
	  -ldflags '-s -w -X github.com/containerd/containerd/v2/version.Version=v$(CONTAINERD_VERSION)' \
	  github.com/containerd/containerd/v2/cmd/containerd@v$(CONTAINERD_VERSION)
	touch $@

build: ## build bin/berth and bin/berth-monitor, static
	@mkdir -p $(BIN)
	go build -ldflags '-s -w -X main.version=$(VERSION)' -o $(BIN)/berth ./cmd/berth
	go build -ldflags '-s -w' -o $(BIN)/berth-monitor ./cmd/berth-monitor

# The program inside the test images.
.PHONY: parts
parts: $(STAMPS)/busybox
	@cd critest
	go build -ldflags '-s -w' -o $(DEPS)/images/standin ./images/standin

demo: ## watch a pod being born, driven by crictl, in a temporary place
demo: deps build parts
	@cd critest
	go build -o $(BIN)/berth-demo ./demo
	exec $(BIN)/berth-demo

test: ## everything below that fits in a few minutes: unit, root, cases, critest, some of crash
test: deps build parts
	@failed=() took=()
	for part in unit root cases critest 'crash SAMPLE=64'; do
	  echo; echo "== make $$part"
	  begin=$$SECONDS
	  $(MAKE) --no-print-directory $$part || failed+=($$part)
	  took+=("$$part $$((SECONDS - begin)) s")
	done
	echo; printf '%s, ' "$${took[@]}"; echo
	(( $${#failed[@]} == 0 )) || { echo "failed: $${failed[*]}"; exit 1; }
	echo "all passed"

# go's lines per package, what failing tests said, and what was skipped and why.
TESTLOG = $(BIN)/berth-testlog
$(TESTLOG): critest/testlog/main.go
	@cd critest
	go build -o $@ ./testlog

unit: ## tests that need no root
unit: parts $(TESTLOG)
	@{
	  code=0
	  go test -p 2 -json $$(go list -f '{{.Dir}}' ./... | grep -vxF "$$(realpath $(ROOT_PACKAGES))") || code=1
	  go test -p 2 -json -skip '$(ROOT_TESTS)' $(ROOT_PACKAGES) || code=1
	  cd critest
	  go test -p 2 -json ./registry ./images ./node ./house ./testlog ./conformance ./guest ./soak || code=1
	  go test -count=1 -json ./crash || code=1 # it reads what go's cache does not know of
	  exit $$code
	} | $(TESTLOG)

root: ## tests with real runc, CNI plugins and overlay (needs root)
root: build $(TESTLOG)
	@go test -p 2 -count=1 -json -run '$(ROOT_TESTS)' $(ROOT_PACKAGES) | $(TESTLOG) -names

cases: ## tests over the socket: public bug cases and bad input (needs root)
cases: build parts $(TESTLOG)
	@cd critest
	go test -p 1 -count=1 -json -timeout 45m ./cases ./demo | $(TESTLOG) -names

critest: ## the CRI conformance suite, a table per group (needs root)
critest: build parts
	@cd critest
	go build -o $(BIN)/berth-conformance ./conformance
	$(BIN)/berth-conformance
	exec $(BIN)/berth-conformance -websocket -focus Streaming

SAMPLE ?= 0
SUITE  ?=
crash: ## fail every step of every request, or kill daemon or monitor there; SAMPLE=N points, SUITE=fail,daemon,… (needs root)
crash: build parts
	@mkdir -p $(BIN)/faults
	go build -ldflags '-s -w -X main.version=$(VERSION)' -tags 'containers_image_openpgp faults' -o $(BIN)/faults/berth ./cmd/berth
	cp $(BIN)/berth-monitor $(BIN)/faults/berth-monitor
	cd critest
	go build -o $(BIN)/berth-crash ./crash
	BERTH_BIN=$(BIN)/faults exec $(BIN)/berth-crash -sample $(SAMPLE) -suite '$(SUITE)'

MINUTES ?= 30
SEED    ?= 0
soak: ## random pods, restarts and kills at concurrency 8 for MINUTES (30), all that is said checked; SEED=S repeats (needs root)
soak: build parts
	@cd critest
	go build -o $(BIN)/berth-soak ./soak
	exec $(BIN)/berth-soak -minutes $(MINUTES) -seed $(SEED)

images-real: ## pull images of Debian packages, 0.3 to 1.5 GB, 127 layers; compare every file (needs root, network)
images-real: build parts $(STAMPS)/debs-large
	@cd critest
	BERTH_REAL=all go test -count=1 -v -timeout 30m -run '^TestRealImages$$' ./cases

PEERS ?=
PART  ?= all
bench: ## times and memory against bare runc, CNI plugins and tar; PART=pods|pulls|density, PEERS=containerd (needs root)
bench: build parts $(if $(filter-out pods density,$(PART)),$(STAMPS)/debs-common) $(if $(filter containerd,$(PEERS)),$(STAMPS)/containerd-$(CONTAINERD_VERSION))
	@cd critest
	go build -o $(BIN)/berth-bench ./bench
	exec $(BIN)/berth-bench -part $(PART) -peers '$(PEERS)'

golden: ## rewrite the golden OCI specs; read the difference before committing it
	@go test ./oci/spec -run 'Golden' -update
	git diff --stat -- oci/spec/testdata

FUZZTIME ?= 20s
fuzz: ## every fuzz target for FUZZTIME (20s)
	@grep -rnoE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]+' cmd image network oci runtime sandbox | sed -E 's/:[0-9]+:func / /' | while read -r file name; do
	  echo "== $$name in $$(dirname $$file)"
	  go test "./$$(dirname $$file)" -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME)
	done

guest: ## the root tests again in a guest with cgroup v2, systemd and AppArmor (slow)
guest: build parts
	@cd critest
	go build -o $(BIN)/berth-guest ./guest
	exec $(BIN)/berth-guest $(or $(PACKAGES),$(ROOT_PACKAGES) critest/guest/smoke)

# CRI's deprecated fields are still sent by callers that berth serves.
STATICCHECK = $(DEPS)/bin/staticcheck -checks inherit,-SA1019

lint: ## gofmt, go vet, staticcheck and the house rules
	@bad=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$bad" ] || { echo "gofmt would change: $$bad"; exit 1; }
	go vet ./...
	cd critest
	go vet ./...
	go build -o $(DEPS)/bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	go run ./house ..
	$(STATICCHECK) ./...
	cd .. && $(STATICCHECK) ./...

install: ## install berth below DESTDIR (default /): binaries, unit, configuration
install: build
	@install -D -m 0755 $(BIN)/berth $(DESTDIR)/usr/local/bin/berth
	install -D -m 0755 $(BIN)/berth-monitor $(DESTDIR)/usr/local/bin/berth-monitor
	install -D -m 0644 packaging/berth.service $(DESTDIR)/etc/systemd/system/berth.service
	[ -e $(DESTDIR)/etc/berth/config.toml ] || install -D -m 0644 packaging/config.toml $(DESTDIR)/etc/berth/config.toml

clean: ## remove what build made (make deps' folder .deps stays)
	@rm -rf $(BIN)
