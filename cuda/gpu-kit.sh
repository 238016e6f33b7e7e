#!/usr/bin/env bash
# Builds gpu-kit/: the program of `make gpu-check` with its device code, for machines without network and cargo.
set -euo pipefail
cd "$(dirname "$0")/.."
REPRISE_NVCC=${REPRISE_NVCC:-$(cuda/toolkit.sh)}
export REPRISE_NVCC
target=${CARGO_TARGET_DIR:-target}
cargo build --locked --release -p reprise-cuda --bin gpu-check
rm -rf gpu-kit
mkdir gpu-kit
cp "$target/release/gpu-check" gpu-kit/gpu-check
strip gpu-kit/gpu-check
commit=$(git rev-parse --short=12 HEAD)
[ -z "$(git status --porcelain)" ] || commit="$commit with changes"
echo "$commit" > gpu-kit/commit
du -sh gpu-kit
