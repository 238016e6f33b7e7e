#!/usr/bin/env bash
# Creates the environment in which the package is built and tested, in the cache folder, and prints its path.
# Exit status 3: there is no suitable Python; the reason is on standard error.
set -euo pipefail
cd "$(dirname "$0")"
venv=${REPRISE_CACHE:-$HOME/.cache/reprise}/python-venv
if ! cmp -s requirements-test.txt "$venv/installed.txt"; then
    refuse() { echo "the Python package cannot be built: $1" >&2; exit 3; }
    python=
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            python=$name
            break
        fi
    done
    [ -n "$python" ] || refuse "Python 3.11 or later is missing"
    if ! "$python" -c 'import venv, ensurepip' 2> /dev/null; then
        # Debian has them in a separate package.
        apt-get install -y python3-venv >&2 || refuse "python3-venv is missing"
    fi
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" -q install -r requirements-test.txt >&2
    cp requirements-test.txt "$venv/installed.txt"
fi
echo "$venv"
