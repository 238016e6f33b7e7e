#!/usr/bin/env bash
# Runs a command of `reprise` that needs a vLLM engine: engine.sh sim accuracy|profile --vllm|bench engine [arguments].
# Installs vLLM for CPUs (6.4 GB) and builds the wheel and the programs if they are missing. $REPRISE_PROGRAMS is a
# folder with programs that are already built. Exit status 3: vLLM cannot be installed here; the reason is above.
set -euo pipefail
python_folder=$(cd "$(dirname "$0")/.." && pwd)
python=$("$python_folder/vllm-venv.sh")
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
wheel=${REPRISE_WHEEL:-$("$python_folder/wheel.sh")}
# Not in the environment, which others may use concurrently with another wheel.
"$python" -m pip -q install --no-deps --no-compile --target "$package" "$wheel"
programs=${REPRISE_PROGRAMS:-}
if [ -z "$programs" ]; then
    export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${REPRISE_CACHE:-$HOME/.cache/reprise}/target}
    (cd "$python_folder/.." && cargo build --locked --release -p reprise -p reprise-agent -p reprise-controlplane --bins) >&2
    programs=$CARGO_TARGET_DIR/release
fi
PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH} "$programs/reprise" "$@" --python "$python"
