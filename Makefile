# Reprise. `make demo` shows it, `make test` proves it. Both need a Rust toolchain and nothing else.
#
# Builds go to one folder outside the tree: $REPRISE_CACHE, by default ~/.cache/reprise.

REPRISE_CACHE ?= $(HOME)/.cache/reprise
export REPRISE_CACHE
export CARGO_TARGET_DIR ?= $(REPRISE_CACHE)/target

RELEASE := $(CARGO_TARGET_DIR)/release
TRACE ?=

.PHONY: help demo build lint test test-quick etcd bench doctor clean

help:
	@echo "make demo        two nodes serve a real trace, every byte checked; one agent is killed and comes back"
	@echo "make test        everything: formatting, lints, unit, model, conformance and end-to-end tests, a demo"
	@echo "make test-quick  the inner loop: lints and tests without the long end-to-end ones"
	@echo "make bench       every benchmark, as JSON lines"
	@echo "make doctor      what this machine can do, and what Reprise will use in consequence"

build:
	cargo build --locked --release --workspace --bins

demo: build
	$(RELEASE)/reprise demo $(if $(TRACE),--trace $(TRACE))

lint:
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	@if command -v cargo-deny > /dev/null; then cargo deny --locked check bans licenses sources; \
	else echo "cargo-deny is not installed: licences and sources of dependencies are not checked"; fi

test-quick: lint
	cargo test --locked --workspace --exclude reprise-e2e
	cargo test --locked -p reprise-e2e --test tidy

# The end-to-end tests start the binaries that lie beside them, so those are built first.
test: lint etcd
	cargo build --locked --workspace --bins
	cargo test --locked --workspace

etcd:
	e2e/etcd/build.sh

bench: build etcd
	$(RELEASE)/reprise bench all --json

doctor: build
	$(RELEASE)/reprise doctor

clean:
	rm -rf $(CARGO_TARGET_DIR)
