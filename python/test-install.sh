#!/usr/bin/env bash
# Tests `pip install ./python` in a fresh environment. pip builds with its own interpreter and tools, so Cargo would
# rebuild in turn for them and wheel.sh; a separate target folder and a fixed path of the environment avoid this. The
# build is not optimised, since only the installation is tested. Skips, with a message, if there is no suitable Python.
set -euo pipefail
cd "$(dirname "$0")"
venv=$(./venv.sh) || {
    [ $? -eq 3 ] || exit 1
    printf '\n%s\n\n' "######## SKIPPED: pip install ./python (the reason is above) ########" >&2
    exit 0
}
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}/install
export CARGO_TARGET_DIR
mkdir -p "$CARGO_TARGET_DIR"
fresh=$CARGO_TARGET_DIR/venv
# Concurrent runs would use the same environment.
exec 9> "$CARGO_TARGET_DIR/lock"
flock 9
rm -rf "$fresh"
"$venv/bin/python" -m venv "$fresh"
MATURIN_PEP517_ARGS="--profile dev" "$fresh/bin/pip" -q install --disable-pip-version-check "$PWD"
# Not in this folder, which has a `reprise` without its native half.
cd "$fresh"
"$fresh/bin/python" -P - << 'PYTHON'
import importlib.metadata
import pathlib
import sys

import reprise

assert pathlib.Path(reprise.__file__).is_relative_to(sys.prefix), f"another package was imported: {reprise.__file__}"
assert (pathlib.Path(reprise.__file__).parent / "py.typed").exists(), "the package has no types"
layout = reprise.Layout(layers=2, parts=1, kv_heads=1, head_dim=8, dtype="fp32", tokens_per_block=16)
namespace = reprise.Namespace(
    model="m", revision="1", layout=layout, hash_algorithm="none", hash_seed="", engine_format="none"
)
assert len(reprise.block_keys(namespace, [b"a", b"b"])) == 32
try:
    reprise.Client("/nonexistent/agent.sock", namespace, layout)
except reprise.AgentAbsent as absent:
    print(f"pip install ./python: reprise {importlib.metadata.version('reprise')} works ({absent})")
else:
    sys.exit("the client reported no error without an agent")
PYTHON
