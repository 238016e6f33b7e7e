#!/usr/bin/env bash
# All tests of the workspace, and beside them those of a whole Kubernetes, which wait most of their time and are shown at the end: test.sh. What they
# start must be there: the programs, the images, Kubernetes (`make test`).
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=(cargo test --locked --workspace --test cluster)
# Once, before either runs: one cargo waits for another that builds.
"${cluster[@]}" --no-run
log=$(mktemp)
# A group of its own, so that all of it can be ended.
set -m
"${cluster[@]}" > "$log" 2>&1 &
beside=$!
set +m
end() {
    kill -- "-$beside" 2> /dev/null || true
    rm -f "$log"
}
trap end EXIT
code=0
cargo test --locked --workspace || code=$?
echo "the tests of a whole Kubernetes:"
wait "$beside" || code=$?
cat "$log"
exit "$code"
