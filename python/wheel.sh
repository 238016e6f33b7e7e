#!/usr/bin/env bash
# Builds the package's wheel for CPython 3.11 and later, and prints its path. Without a C++ compiler, the wheel has no
# extents, and states it. Exit status 3: see venv.sh.
set -euo pipefail
cd "$(dirname "$0")"
venv=$(./venv.sh)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${REPRISE_CACHE:-$HOME/.cache/reprise}/target}
wheels=$CARGO_TARGET_DIR/wheels
features=()
if ! echo 'int main() {}' | ${CXX:-c++} -x c++ -std=c++17 -fsyntax-only - 2> /dev/null; then
    echo "wheel.sh: ${CXX:-c++} cannot compile C++17: the wheel has no extents, all blocks take the agent's arena" >&2
    features=(--no-default-features)
fi
"$venv/bin/maturin" build --release --locked --quiet --interpreter "$venv/bin/python" --out "$wheels" "${features[@]}" >&2
ls -t "$wheels"/reprise-*.whl | head -n 1
