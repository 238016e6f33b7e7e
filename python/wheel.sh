#!/usr/bin/env bash
# Builds the package's wheel for CPython 3.11 and later, and prints its path. Exit status 3: see venv.sh.
set -euo pipefail
cd "$(dirname "$0")"
venv=$(./venv.sh)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${REPRISE_CACHE:-$HOME/.cache/reprise}/target}
wheels=$CARGO_TARGET_DIR/wheels
"$venv/bin/maturin" build --release --locked --quiet --interpreter "$venv/bin/python" --out "$wheels" >&2
ls -t "$wheels"/reprise-*.whl | head -n 1
