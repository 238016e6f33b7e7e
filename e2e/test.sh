#!/usr/bin/env bash
# Runs all tests of the workspace: test.sh. The tests of a whole Kubernetes cluster run in parallel, since
# they mostly wait. The errors of failed tests are printed last. The programs, the images and Kubernetes must
# be built (`make test`).
set -euo pipefail
cd "$(dirname "$0")/.."
cluster=(cargo test --locked --workspace --test cluster)
# Built before either runs, since two concurrent cargo builds would wait for each other.
"${cluster[@]}" --no-run
logs=${REPRISE_CACHE:-$HOME/.cache/reprise}
log=$logs/test.log
# The two nodes' pools take 14 GiB, and agents refuse a pool that leaves less than 5 % of a file system free.
read -r size available < <(df --block-size=1G --output=size,avail "$logs" | tail -1)
needed=$((20 + size / 20))
if [ "$available" -lt "$needed" ]; then
    echo "only $available GiB are available at $logs, and the tests need $needed: delete files, or set REPRISE_CACHE"
    exit 1
fi
cluster_log=$logs/test-cluster.log
echo "running the tests of a whole Kubernetes cluster in parallel, with the log $cluster_log"
# Job control gives it its own process group, so that all of it can be killed. Only SIGKILL also ends its
# namespaces.
set -m
"${cluster[@]}" > "$cluster_log" 2>&1 < /dev/null &
parallel=$!
set +m
trap 'kill -KILL -- "-$parallel" 2> /dev/null || true' EXIT
failed=()
# run NAME ARGUMENTS...: runs all selected tests, even after a failure.
run() {
    local name=$1
    shift
    cargo test --locked --workspace --no-fail-fast "$@" 2>&1 | tee -a "$log" || failed+=("$name")
}
: > "$log"
run "tests of the crates"
# They mostly wait, so more of them run at a time than there are processors.
RUST_TEST_THREADS=$(($(nproc) + 1)) run "end-to-end tests" --test e2e --test api_server
wait "$parallel" || failed+=("tests of a whole Kubernetes cluster")
echo "output of the tests of a whole Kubernetes cluster: $cluster_log"
grep '^test ' "$cluster_log" || true
[ ${#failed[@]} -gt 0 ] || exit 0
# From each list of failures, with the output of the failed tests, to its end.
awk '/^failures:$/ { on = 1 } on { print } /^test result: FAILED/ { on = 0 }' "$log" "$cluster_log"
# A program that does not compile or start has no such list.
echo "the first errors:"
grep --no-filename -E -A 2 "^(test panicked:|thread '.*panicked at )" "$log" "$cluster_log" | cut -c 1-300 | head -12 || true
for name in "${failed[@]}"; do echo "FAILED: $name (logs: $log, $cluster_log)"; done
exit 1
