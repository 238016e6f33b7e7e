#!/usr/bin/env bash
# Checks the format and lints of the Python package. Skips, with a message, if there is no suitable Python.
set -euo pipefail
cd "$(dirname "$0")"
cargo fmt --check
# Without it, the caller reports that licences are not checked.
if command -v cargo-deny > /dev/null; then
    cargo deny --locked check --config ../deny.toml bans licenses sources
fi
venv=$(./venv.sh) || {
    [ $? -eq 3 ] || exit 1
    printf '\n%s\n\n' "######## SKIPPED: the lints of the Python package (the reason is above) ########" >&2
    exit 0
}
PYO3_PYTHON=$venv/bin/python cargo clippy --locked --all-targets -- -D warnings
"$venv/bin/ruff" check --no-cache .
"$venv/bin/ruff" format --no-cache --check .
