# Build and test targets; `make help` lists them. `make demo` needs a Rust toolchain only. `make test` also needs
# root, for the nodes of its Kubernetes cluster, and Python 3 to fetch nvcc; with Python 3.11 or later it also tests the
# Python package.
#
# Build outputs are in one folder outside the tree: $REPRISE_CACHE, by default ~/.cache/reprise.

REPRISE_CACHE ?= $(HOME)/.cache/reprise
export REPRISE_CACHE
export CARGO_TARGET_DIR ?= $(REPRISE_CACHE)/target

RELEASE := $(CARGO_TARGET_DIR)/release
# Cargo profile of the images for tests and the demo: `dev`, or `images` as in a release.
REPRISE_IMAGES_PROFILE ?= dev
export REPRISE_IMAGES_PROFILE
TRACE ?=
# Path of blocks in `make demo`: `rings`, or empty for the default.
ENGINE_PATH ?=

.PHONY: help demo build check deny lint lint-python test test-quick soak fuzz test-python test-vllm vm-test e2e-k8s e2e-scale e2e-skew k8s-score k8s-lab k8s-demo wheel etcd kubernetes cluster helm images images-test bench gpu-kit gpu-check cuda-toolkit doctor clean

help:
	@echo "make demo        run two nodes on a real trace, verify every byte, kill and restart one agent; ENGINE_PATH=rings: with rings"
	@echo "make test        run lints and all tests except e2e-scale and e2e-skew, with a real Kubernetes; needs root"
	@echo "make test-quick  run lints and tests without the long end-to-end tests"
	@echo "make soak        run random tests with new, printed seeds for SOAK_SECONDS (3600)"
	@echo "make fuzz        run all fuzz targets for FUZZ_SECONDS (300) or on FUZZ_INPUTS; TARGETS='NAME ...' selects some"
	@echo "make wheel       build the Python package for Python 3.11 and later"
	@echo "make test-python run the tests of the Python package with real processes"
	@echo "make test-vllm   run the tests with vLLM on CPU, which it installs (6.4 GB), and those of the GPU adapters"
	@echo "make vm-test     run NVMe driver and agent on controllers of virtual machines, through VFIO; needs Debian packages"
	@echo "make e2e-k8s     run the Kubernetes tests only: two nodes with real pods; needs root, installs packages"
	@echo "make k8s-score   check the chart's objects with kube-score; builds it first"
	@echo "make e2e-scale   run the operator with 1,000 kwok nodes: time, memory, writes; needs root"
	@echo "make e2e-skew    upgrade from an older commit (OLD=COMMIT) under load, and roll back; needs root"
	@echo "make k8s-lab     start a Kubernetes cluster for manual use and print its commands; needs root"
	@echo "make k8s-demo    run Reprise on Kubernetes: chart, operator, agents, two engine pods; needs root"
	@echo "make images      build images of all programs as OCI archives, without a container engine"
	@echo "make images-test build the images for tests, from the programs of the test build"
	@echo "make bench       run all benchmarks and print JSON lines"
	@echo "make gpu-check   check and measure on a machine with a GPU; needs no network and no cargo"
	@echo "make gpu-kit     build gpu-kit/, the programs of gpu-check for such a machine"
	@echo "make check       check structure and language of the tree, in seconds"
	@echo "make deny        check licences, sources and advisories of all crates; installs cargo-deny; exit status 3: no current database"
	@echo "make doctor      print the capabilities of this machine and what Reprise uses"
	@echo "make build       build all optimised programs except those of the end-to-end tests"
	@echo "make lint        check formatting and lints; with cargo-deny also as make deny, without a network from its cache"
	@echo "make etcd        build etcd for the tests, once"
	@echo "make kubernetes  build the Kubernetes API server, once"
	@echo "make cluster     build Kubernetes, CoreDNS and Helm, once, and install node packages; needs root"
	@echo "make helm        build Helm, once, and download Kubernetes schemas for the chart tests"
	@echo "make clean       delete Cargo's build outputs"

# Without the programs of the end-to-end tests, which only the tests run, and of the benchmarks with other systems.
build:
	cargo build --locked --release --workspace --exclude reprise-e2e --exclude reprise-bench --bins

# Only the programs that the demo starts, with the profile that compiles fastest: without link-time optimisation. The
# agent is built without Kubernetes, which is a third of all code.
DEMO_PROGRAMS := -p reprise -p reprise-agent -p reprise-controlplane --no-default-features
# With ENGINE_PATH=rings also the rings, which need a C++ compiler.
demo:
	cargo build --locked --profile images $(DEMO_PROGRAMS) $(if $(filter rings,$(ENGINE_PATH)),--features reprise/gpu) --bins
	$(CARGO_TARGET_DIR)/images/reprise demo $(if $(TRACE),--trace $(TRACE)) $(if $(ENGINE_PATH),--engine-path $(ENGINE_PATH))

# Structure and language of the tree; `cargo xtask figures` prints figures about its structure.
check:
	cargo xtask check

lint: check lint-python
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
# These tests are built only by name: `--all-targets` does not include them.
	cargo clippy --locked --workspace --test e2e --test api_server --test cluster --test scale --test vm -- -D warnings
# Exit status 3: there is no current database of advisories. It is printed, and the rest of the lints counts.
	@if command -v cargo-deny > /dev/null; then xtask/deny.sh || [ $$? -eq 3 ]; \
	else echo "cargo-deny is not installed: licences, sources and advisories of dependencies are not checked; make deny installs it"; fi

# With a network it updates the database of advisories, otherwise it uses the cached one (xtask/deny.sh).
deny:
	xtask/deny.sh

lint-python:
	python/lint.sh

# Lints and tests select the same packages, and therefore the same features: dependencies are compiled once.
test-quick: STARTED := $(shell date +%s)
test-quick: lint
	@code=0; cargo test --locked --workspace || code=$$?; \
	echo "make test-quick took $$(($$(date +%s) - $(STARTED))) s"; exit $$code

# The end-to-end tests start the binaries in their own folder, so those are built first. The build always includes a
# test of the workspace: otherwise dependencies have other features and are compiled again.
PROGRAMS := cargo build --locked --workspace --bins --tests --test e2e --test api_server
# The programs of a cluster without Kubernetes.
AGENT_PROGRAMS := cargo build --locked --workspace --bin reprise-agent --bin reprise-controlplane --test protocol_document
# All programs and the Kubernetes tests, without the tests of every crate.
CLUSTER_PROGRAMS := cargo build --locked --workspace --bins --test cluster

test: export REPRISE_REQUIRE_NVCC := 1
test: lint etcd cluster helm cuda-toolkit
	cargo check --locked $(DEMO_PROGRAMS)
	e2e/prometheus/promtool.sh
# One build, which uses the processors better than one for each group of tests.
	$(PROGRAMS) --test cluster --test vm
	$(MAKE) vm-test
	images/build.sh --profile $(REPRISE_IMAGES_PROFILE)
	e2e/test.sh
	python/test.sh
	python/test-vllm.sh

# Random tests with new seeds; needs no root.
SOAK_SECONDS ?= 3600
soak: etcd kubernetes
	$(PROGRAMS)
	cargo build --locked --release -p reprise --bins
	SOAK_SECONDS=$(SOAK_SECONDS) e2e/soak.sh

# Needs a C++ compiler. The first run compiles the targets with counters for coverage. Inputs, logs and failed inputs are
# in $REPRISE_CACHE/fuzz.
FUZZ_SECONDS ?= 300
FUZZ_INPUTS ?=
TARGETS ?=
fuzz:
	cargo run --locked --quiet --package reprise-fuzz -- run $(if $(FUZZ_INPUTS),--inputs $(FUZZ_INPUTS),--seconds $(FUZZ_SECONDS)) $(TARGETS)

wheel:
	python/wheel.sh

# Uses the debug binaries, as the end-to-end tests do.
test-python:
	$(AGENT_PROGRAMS)
	python/test.sh

test-vllm:
	$(AGENT_PROGRAMS)
	python/test-vllm.sh

# The first run downloads QEMU and a kernel (114 MB). The programs in the machine that use the driver are optimised, since
# its speed is compared with the kernel's. Agent and control plane are those of the other tests.
VM_PROGRAMS := $(CARGO_TARGET_DIR)/images/examples
vm-test:
	e2e/vm/packages.sh > /dev/null
	cargo build --locked --profile images -p reprise-nvme -p reprise-cuda --example vm_guest --example vm_rings
	cargo build --locked --workspace --bin reprise-agent --bin reprise-controlplane --test vm
	REPRISE_VM_GUEST=$(VM_PROGRAMS)/vm_guest REPRISE_VM_RINGS=$(VM_PROGRAMS)/vm_rings \
	    cargo test --locked --workspace --test vm

e2e-k8s: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	cargo test --locked --workspace --test cluster

k8s-score:
	e2e/kube-score/score.sh

e2e-scale: etcd cluster images-test
	e2e/kwok/build.sh
	$(PROGRAMS)
	cargo test --locked --workspace --test scale

# Programs of an older commit, built once per commit, together with those of this tree.
OLD ?=
e2e-skew: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	@[ -n "$(OLD)" ] || { echo "OLD is not set: run make e2e-skew OLD=COMMIT" >&2; exit 2; }
	REPRISE_OLDER_IMAGES="$$(e2e/skew/build.sh $(OLD))" && export REPRISE_OLDER_IMAGES && \
	    cargo test --locked --workspace --test cluster -- an_older_version

k8s-lab: etcd cluster
	cargo build --locked -p reprise-e2e --bins
	cargo run --locked -p reprise-e2e --bin k8s-lab

# Builds all programs, because the images already contain them.
k8s-demo: etcd cluster images-test
	$(CLUSTER_PROGRAMS)
	$(CARGO_TARGET_DIR)/debug/k8s-demo

etcd:
	e2e/etcd/build.sh

# The first run takes 8 minutes on two cores; later runs build nothing.
kubernetes:
	e2e/kubernetes/build.sh kube-apiserver

# The first run takes 20 minutes; later runs build nothing. Node packages of the distribution need root.
cluster:
	e2e/kubernetes/packages.sh
	e2e/kubernetes/build.sh kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl
	e2e/coredns/build.sh
	e2e/helm/build.sh

# The first run takes 4 minutes and downloads the schemas of four Kubernetes versions for the chart tests.
helm:
	e2e/helm/build.sh
	e2e/kubernetes/schemas.sh

# Archives are in $REPRISE_CACHE/images, built once for equal sources and tools. Needs Rust's musl target, musl-gcc, Go
# and buildah, and installs them where permitted.
images:
	images/build.sh

images-test:
	images/build.sh --profile $(REPRISE_IMAGES_PROFILE)

bench: etcd
	cargo build --locked --release --workspace --exclude reprise-e2e --bins
	$(RELEASE)/reprise bench all --json
	$(RELEASE)/reprise-bench all --json

# With cargo and nvcc it builds the program, otherwise it uses gpu-kit/. The report is in $GPU_CHECK_OUT, by default
# target/gpu-check.
gpu-check:
	cuda/gpu-check.sh

gpu-kit: cuda-toolkit
	cuda/gpu-kit.sh

# The first run downloads nvcc 13.0 (104 MB); later runs do nothing.
cuda-toolkit:
	cuda/toolkit.sh

doctor: build
	$(RELEASE)/reprise doctor

clean:
	rm -rf $(CARGO_TARGET_DIR)
