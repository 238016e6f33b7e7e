#!/usr/bin/env bash
# Runs all tests of the workspace: test.sh. The tests of a whole Kubernetes cluster run in parallel, since
# they mostly wait, and their output is printed at the end. The programs, the images and Kubernetes must be
# built (`make test`).
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=(cargo test --locked --workspace --test cluster)
# Built before either runs, since two concurrent cargo builds would wait for each other.
"${cluster[@]}" --no-run
log=${REPRISE_CACHE:-$HOME/.cache/reprise}/test-cluster.log
echo "running the tests of a whole Kubernetes cluster in parallel, with the log $log"
# Job control gives it its own process group, so that all of it can be killed. Only SIGKILL also ends its
# namespaces.
set -m
"${cluster[@]}" > "$log" 2>&1 < /dev/null &
parallel=$!
set +m
trap 'kill -KILL -- "-$parallel" 2> /dev/null || true' EXIT
code=0
# Runs all tests even after a failure.
cargo test --locked --workspace --no-fail-fast || code=$?
wait "$parallel" || code=$?
echo "output of the tests of a whole Kubernetes cluster:"
cat "$log"
exit "$code"
