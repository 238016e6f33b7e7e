#!/usr/bin/env bash
# Runs the tests with vLLM's CPU engine: run.sh WHEEL [pytest arguments]. Skips, and says so, where vLLM cannot be installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wheel=$(realpath "$1")
shift
if ! python=$("$here/install.sh"); then
    printf '\n%s\n\n' "######## SKIPPED: the tests with a real vLLM engine (the reason is above) ########" >&2
    exit 0
fi
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
# Beside the environment, which others may use at the same time with another wheel.
"$python" -m pip -q install --no-deps --no-compile --target "$package" "$wheel"
cd "$here"
PYTHONPATH=$package:$here:$here/.. "$python" -m pytest -p no:cacheprovider --rootdir "$here" "$@"
