#!/usr/bin/env bash
# Builds the wheel and runs the package's tests against it and the debug binaries beside the other tests: test.sh
# [pytest arguments]. Without arguments it also installs the package as people do (test-install.sh). Skips, and says so, where
# there is no Python for it.
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
# Beside the environment, which another checkout may use at the same time with another wheel.
"$venv/bin/pip" -q install --no-deps --no-compile --target "$package" "$wheel"
# From elsewhere: the folder of this script holds a `reprise` without its native half.
cd "$package"
PYTHONPATH=$package "$venv/bin/python" -P -m pytest -p no:cacheprovider -c "$OLDPWD/pyproject.toml" --rootdir "$OLDPWD" \
    --ignore "$OLDPWD/tests/vllm" --ignore "$OLDPWD/tests/tier" --ignore "$OLDPWD/tests/sglang" "${@:-$OLDPWD/tests}"
if [ $# -eq 0 ]; then
    "$OLDPWD/test-install.sh"
fi
