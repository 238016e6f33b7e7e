#!/usr/bin/env bash
# All tests of the workspace, and beside them those of a whole Kubernetes, which wait most of their time and are shown at the end: test.sh. What they
# start must be there: the programs, the images, Kubernetes (`make test`).
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=(cargo test --locked --workspace --test cluster)
# Once, before either runs: one cargo waits for another that builds.
"${cluster[@]}" --no-run
log=${REPRISE_CACHE:-$HOME/.cache/reprise}/test-cluster.log
echo "beside the other tests, those of a whole Kubernetes: $log"
# A group of its own, so that all of it can be ended. Its namespaces end with it, if it is killed: other signals do not get there.
set -m
"${cluster[@]}" > "$log" 2>&1 < /dev/null &
beside=$!
set +m
trap 'kill -KILL -- "-$beside" 2> /dev/null || true' EXIT
code=0
# Every failure of a run is worth knowing.
cargo test --locked --workspace --no-fail-fast || code=$?
wait "$beside" || code=$?
echo "the tests of a whole Kubernetes:"
cat "$log"
exit "$code"
