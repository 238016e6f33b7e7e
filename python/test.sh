#!/usr/bin/env bash
# Builds the wheel and runs the package's tests with it and the debug binaries: test.sh [pytest arguments]. Without
# arguments, also tests the installation (test-install.sh). Skips, with a message, if there is no suitable Python.
set -euo pipefail
cd "$(dirname "$0")"
if ! wheel=$(./wheel.sh); then
    ./venv.sh > /dev/null || [ $? -ne 3 ] || {
        printf '\n%s\n\n' "######## SKIPPED: the tests of the Python package (the reason is above) ########" >&2
        exit 0
    }
    exit 1
fi
venv=$(./venv.sh)
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
# Not in the environment, which another checkout may use concurrently with another wheel.
"$venv/bin/pip" -q install --no-deps --no-compile --target "$package" "$wheel"
# Not in the folder of this script, which has a `reprise` without its native half.
cd "$package"
PYTHONPATH=$package "$venv/bin/python" -P -m pytest -p no:cacheprovider -c "$OLDPWD/pyproject.toml" --rootdir "$OLDPWD" \
    --ignore "$OLDPWD/tests/vllm" --ignore "$OLDPWD/tests/tier" --ignore "$OLDPWD/tests/sglang" "${@:-$OLDPWD/tests}"
if [ $# -eq 0 ]; then
    "$OLDPWD/test-install.sh"
fi
