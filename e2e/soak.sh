#!/usr/bin/env bash
# Runs the random tests with new seeds for SOAK_SECONDS (3600 by default): soak.sh. Prints each seed, and the
# command that replays a failure. Each round has all parts, so the last one may end later. SOAK_SEED=N is the
# seed of the first round. Fails if any part has failed. `make test` runs the same tests with fixed seeds. The
# programs and tests must be built (`make soak`).
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${SOAK_SECONDS:-3600}
target=${CARGO_TARGET_DIR:-${REPRISE_CACHE:-$HOME/.cache/reprise}/target}
test=(cargo test --locked --workspace)
seeds_of_simulator=200
failures=()

# part NAME COMMAND...: runs one part, and records the command if it fails.
part() {
    local name=$1 started=$SECONDS
    shift
    echo "soak: seed $seed: $name: $*"
    if "$@"; then
        echo "soak: seed $seed: $name: passed in $((SECONDS - started)) s"
    else
        echo "soak: seed $seed: $name: FAILED; replay with: $*"
        failures+=("$*")
    fi
}

round() {
    part "property tests" env PROPTEST_RNG_SEED="$seed" "${test[@]}"
    part "agent core" env REPRISE_FIRST_SEED="$seed" "${test[@]}" --test agent
    part "grants of queues" env REPRISE_FIRST_SEED="$seed" "${test[@]}" --lib -- random_events_never_grant
    part "device worker" env REPRISE_FIRST_SEED="$seed" "${test[@]}" --bin reprise-agent -- power_loss
    part "simulated cluster" "$target/release/reprise" sim chaos --seeds $seeds_of_simulator --start "$seed"
    part "operator" env REPRISE_E2E_SEED="$seed" REPRISE_E2E_KILL_PERCENT=100 "${test[@]}" \
        --test e2e -- operator::chaos:: operator::kills:: repeatedly_killed_operator
    part "extents" env REPRISE_E2E_SEED="$seed" REPRISE_E2E_EXTENT_KILLS=200 "${test[@]}" \
        --test e2e -- processes::extents::
    part "processes" env REPRISE_E2E_SEED="$seed" "${test[@]}" \
        --test e2e -- processes::kill:: processes::corruption:: garbage peer_killed saving_far_more
}

seed=${SOAK_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
rounds=0
while [ $rounds -eq 0 ] || [ $SECONDS -lt "$seconds" ]; do
    round
    rounds=$((rounds + 1))
    seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
done
echo "soak: $rounds rounds in $SECONDS s, ${#failures[@]} failures"
for failure in "${failures[@]}"; do
    echo "soak: replay with: $failure"
done
[ ${#failures[@]} -eq 0 ]
