#!/usr/bin/env bash
# Compiles a crate of this workspace: rustc.sh RUSTC ARGUMENTS. `make fuzz` sets it as RUSTC_WORKSPACE_WRAPPER. Crates with
# parsers get the counters that libFuzzer reads. All others stay without: counters only slow down the targets.
#
# The options are those of `cargo fuzz`. They are not unstable, unlike sanitizers.
set -euo pipefail
parsers='agent|reprise_(agent|agent_core|client|controlplane|controlplane_core|identity|io|nvme|policy|proto|simulator|transport)'
arguments=" $* "
if [[ "$arguments" =~ \ --crate-name\ ($parsers)\  ]]; then
    exec "$@" -Copt-level=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
        -Cllvm-args=-sanitizer-coverage-trace-compares
fi
exec "$@"
