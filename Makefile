# Reprise. `make demo` shows it, `make test` proves it. Both need a Rust toolchain and nothing else, and `make test` root, for the nodes of its
# Kubernetes; with a Python from 3.11 on it also proves the Python package.
#
# Builds go to one folder outside the tree: $REPRISE_CACHE, by default ~/.cache/reprise.

REPRISE_CACHE ?= $(HOME)/.cache/reprise
export REPRISE_CACHE
export CARGO_TARGET_DIR ?= $(REPRISE_CACHE)/target

RELEASE := $(CARGO_TARGET_DIR)/release
# Of the images that tests and the demonstration run: `dev`, or `images`, as they are released.
REPRISE_IMAGES_PROFILE ?= dev
export REPRISE_IMAGES_PROFILE
TRACE ?=

.PHONY: help demo build lint lint-python test test-quick soak test-python test-vllm e2e-k8s e2e-scale e2e-skew k8s-lab k8s-demo wheel etcd kubernetes cluster helm images images-test bench doctor clean

help:
	@echo "make demo        two nodes serve a real trace, every byte checked; one agent is killed and comes back"
	@echo "make test        everything but e2e-scale and e2e-skew: lints, unit, model, conformance and end-to-end tests, a demo, a whole Kubernetes; needs root"
	@echo "make test-quick  the inner loop: lints and tests without the long end-to-end ones"
	@echo "make soak        random tests with new seeds, each of which is printed, for SOAK_SECONDS (3600); make test has fixed seeds"
	@echo "make wheel       the Python package, for every Python from 3.11 on"
	@echo "make test-python its tests, against real processes"
	@echo "make test-vllm   the tests with a real vLLM engine (CPU), which is installed for it: 6.4 GB; adapters for GPUs"
	@echo "make e2e-k8s     the tests with a whole Kubernetes alone: two nodes and real pods; needs root, and installs what it lacks"
	@echo "make e2e-scale   the operator in its pod with 1,000 nodes that kwok plays: time, memory, writes; needs root"
	@echo "make e2e-skew    programs of an older commit, OLD=COMMIT, beside these while a release is upgraded under load, and taken back; needs root"
	@echo "make k8s-lab     such a cluster for a person: up until it is interrupted, with the commands to look around; needs root"
	@echo "make k8s-demo    Reprise on such a cluster: chart, operator, agents, two pods that are engines, and what they hit; needs root"
	@echo "make images      images of all programs for Kubernetes, as OCI archives, without a container engine"
	@echo "make images-test the same for tests, of the programs that these have built"
	@echo "make bench       every benchmark, as JSON lines"
	@echo "make doctor      what this machine can do, and what Reprise will use in consequence"
	@echo "make build       all programs but those of the end-to-end tests, optimised"
	@echo "make lint        formatting and lints of Rust and Python; licences and sources of dependencies, where cargo-deny is installed"
	@echo "make etcd        builds etcd, as the tests need it, once"
	@echo "make kubernetes  builds Kubernetes' API server, once"
	@echo "make cluster     builds a whole Kubernetes, CoreDNS and Helm, once, and installs packages that nodes need; needs root for these"
	@echo "make helm        builds Helm, once, and fetches Kubernetes' schemas for the tests of the chart"
	@echo "make clean       removes what cargo has built"

# Without the end-to-end tests' own programs, which only they run.
build:
	cargo build --locked --release --workspace --exclude reprise-e2e --bins

demo: build
	$(RELEASE)/reprise demo $(if $(TRACE),--trace $(TRACE))

lint: lint-python
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
# Tests that are built by name only, and that cargo leaves out beside a word for all targets.
	cargo clippy --locked --workspace --test cluster --test scale -- -D warnings
	@if command -v cargo-deny > /dev/null; then cargo deny --locked check bans licenses sources; \
	else echo "cargo-deny is not installed: licences and sources of dependencies are not checked"; fi

lint-python:
	python/lint.sh

test-quick: lint
	cargo test --locked --workspace --exclude reprise-e2e
	cargo test --locked -p reprise-e2e --test tidy

# The end-to-end tests start the binaries that lie beside them, so those are built first. Always with some test of the workspace: without any,
# dependencies have other features, and are compiled again.
PROGRAMS := cargo build --locked --workspace --bins --tests
# All programs and the tests of a whole Kubernetes, without those of every crate.
CLUSTER_PROGRAMS := cargo build --locked --workspace --bins --test cluster

test: lint etcd cluster helm
	e2e/prometheus/promtool.sh
	$(PROGRAMS)
	images/build.sh --profile $(REPRISE_IMAGES_PROFILE)
	e2e/test.sh
	python/test.sh
	python/test-vllm.sh

# Random tests with new seeds. It needs no root.
SOAK_SECONDS ?= 3600
soak: etcd kubernetes
	$(PROGRAMS)
	cargo build --locked --release -p reprise --bins
	SOAK_SECONDS=$(SOAK_SECONDS) e2e/soak.sh

wheel:
	python/wheel.sh

# Against the debug binaries, as the end-to-end tests.
test-python:
	cargo build --locked -p reprise-agent -p reprise-controlplane --bins
	python/test.sh

test-vllm:
	cargo build --locked -p reprise-agent -p reprise-controlplane --bins
	python/test-vllm.sh

e2e-k8s: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	cargo test --locked --workspace --test cluster

e2e-scale: etcd cluster images-test
	e2e/kwok/build.sh
	$(PROGRAMS)
	cargo test --locked --workspace --test scale

# Programs of an older commit, which are built once for it, beside those of this tree.
OLD ?=
e2e-skew: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	@[ -n "$(OLD)" ] || { echo "say which commit is the older one: make e2e-skew OLD=COMMIT" >&2; exit 2; }
	REPRISE_OLDER_IMAGES="$$(e2e/skew/build.sh $(OLD))" && export REPRISE_OLDER_IMAGES && \
	    cargo test --locked --workspace --test cluster -- an_older_version

k8s-lab: etcd cluster
	cargo build --locked -p reprise-e2e --bins
	cargo run --locked -p reprise-e2e --bin k8s-lab

# Built with all others: the images have these programs already.
k8s-demo: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	$(CARGO_TARGET_DIR)/debug/k8s-demo

etcd:
	e2e/etcd/build.sh

# Once, 8 minutes on two cores; afterwards nothing is built.
kubernetes:
	e2e/kubernetes/build.sh kube-apiserver

# Once, 20 minutes; afterwards nothing is built. The distribution's part of a node is installed, which needs root.
cluster:
	e2e/kubernetes/packages.sh
	e2e/kubernetes/build.sh kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl
	e2e/coredns/build.sh
	e2e/helm/build.sh

# Once, 4 minutes, and Kubernetes' schemas of four versions for the tests of the chart.
helm:
	e2e/helm/build.sh
	e2e/kubernetes/schemas.sh

# Below $REPRISE_CACHE/images, once for the same sources and tools. Needs Rust's target for musl, musl-gcc, Go and buildah, which it installs where
# it may.
images:
	images/build.sh

images-test:
	images/build.sh --profile $(REPRISE_IMAGES_PROFILE)

bench: build etcd
	$(RELEASE)/reprise bench all --json

doctor: build
	$(RELEASE)/reprise doctor

clean:
	rm -rf $(CARGO_TARGET_DIR)
