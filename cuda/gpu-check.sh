#!/usr/bin/env bash
# Checks and measures Reprise on a machine with a GPU; no network is needed.
#
# With cargo and nvcc, builds the program from the tree. Otherwise uses the kit in gpu-kit/, which `make gpu-kit` builds
# on another machine. Writes gpu-check.md and gpu-check.json to $GPU_CHECK_OUT (target/gpu-check by default).
# Exit codes: 0 if all steps passed, 1 if a step failed, 2 if this machine cannot run GPU code.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${GPU_CHECK_OUT:-target/gpu-check}
mkdir -p "$out"

nvcc=${REPRISE_NVCC:-}
if [ -z "$nvcc" ]; then
    for candidate in "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
        if [ -x "$candidate" ]; then nvcc=$candidate; break; fi
    done
fi
sanitizer=
for candidate in "$(command -v compute-sanitizer || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer"; do
    if [ -x "$candidate" ]; then sanitizer=$candidate; break; fi
done

commit=unknown
program=
if command -v cargo > /dev/null && [ -n "$nvcc" ]; then
    target=${CARGO_TARGET_DIR:-target}
    if REPRISE_NVCC=$nvcc cargo build --locked --release -p reprise-cuda --bin gpu-check; then
        program=$target/release/gpu-check
        commit=$(git rev-parse --short=12 HEAD 2> /dev/null || echo unknown)
    else
        echo "gpu-check: cannot build the program; trying the kit" >&2
    fi
fi
if [ -z "$program" ] && [ -f gpu-kit/gpu-check ]; then
    # Copied outside: the kit may lie on a file system without permission to execute.
    program=$(mktemp)
    trap 'rm -f "$program"' EXIT
    cp gpu-kit/gpu-check "$program"
    chmod +x "$program"
    commit=$(cat gpu-kit/commit)
fi
if [ -z "$program" ]; then
    echo "gpu-check: no program to run: install cargo and nvcc 13.0, or run 'make gpu-kit' on a machine with a" >&2
    echo "network and copy the folder gpu-kit here" >&2
    exit 2
fi
arguments=(--out "$out" --date "$(date -u +%F)" --commit "$commit" --native cuda/native)
[ -z "$nvcc" ] || arguments+=(--nvcc "$nvcc")
[ -z "$sanitizer" ] || arguments+=(--sanitizer "$sanitizer")
code=0
"$program" "${arguments[@]}" "$@" || code=$?
echo "report: $out/gpu-check.md, $out/gpu-check.json"
exit "$code"
