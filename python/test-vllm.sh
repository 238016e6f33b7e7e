#!/usr/bin/env bash
# Builds the wheel and runs the tests with vLLM's CPU engine against it and the debug binaries: test-vllm.sh [pytest
# arguments]. Skips, and says so, where vLLM cannot be installed.
set -euo pipefail
cd "$(dirname "$0")"
if ! python=$(./vllm-venv.sh); then
    printf '\n%s\n\n' "######## SKIPPED: the tests with a real vLLM engine (the reason is above) ########" >&2
    exit 0
fi
wheel=$(./wheel.sh)
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
# Beside the environment, which others may use at the same time with another wheel.
"$python" -m pip -q install --no-deps --no-compile --target "$package" "$wheel"
tests=$PWD/tests
cd "$tests/vllm"
PYTHONPATH=$package:$tests/vllm:$tests "$python" -P -m pytest -p no:cacheprovider -c /dev/null --rootdir "$tests/vllm" \
    -ra --durations=10 "${@:-.}"
