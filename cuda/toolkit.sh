#!/usr/bin/env bash
# Fetches the pinned nvcc 13.0 from PyPI into the cache folder, once (104 MB). Prints the path of nvcc.
#
# The packages are NVIDIA's and have its licence; they are fetched, never copied into the tree. Python 3.9 or later
# with pip is needed, and a C++ compiler to run nvcc. REPRISE_NVCC names another nvcc: then nothing is fetched.
set -euo pipefail
if [ -n "${REPRISE_NVCC:-}" ]; then
    if [ ! -x "$REPRISE_NVCC" ]; then
        echo "REPRISE_NVCC is $REPRISE_NVCC, which is not a program: set it to an nvcc 12.8 or later, or unset it" >&2
        exit 1
    fi
    echo "$REPRISE_NVCC"
    exit
fi
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
requirements=$PWD/toolkit.txt
hash=$(sha256sum "$requirements" | cut -c1-12)
folder=$cache/cuda-toolkit-$hash
nvcc=$folder/nvidia/cu13/bin/nvcc
if [ ! -x "$nvcc" ]; then
    if ! command -v python3 > /dev/null; then
        echo "nvcc cannot be fetched: python3 is not installed; install it, or set REPRISE_NVCC to an nvcc 13" >&2
        exit 1
    fi
    if ! python3 -c 'import venv, ensurepip' 2> /dev/null; then
        # Debian has them in a separate package.
        apt-get install -y python3-venv >&2 || {
            echo "nvcc cannot be fetched: python3-venv is missing; install it, or set REPRISE_NVCC to an nvcc 13" >&2
            exit 1
        }
    fi
    mkdir -p "$cache"
    new=$(mktemp -d "$cache/cuda-toolkit.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    # An own environment: the system's Python may not have pip, or refuse it.
    python3 -m venv "$new/venv" >&2
    "$new/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: \
        --target "$new/packages" -r "$requirements" >&2
    # Packages do not always keep the permission to execute.
    find "$new/packages/nvidia/cu13/bin" "$new/packages/nvidia/cu13/nvvm/bin" -type f -exec chmod +x {} +
    # Another process may have finished first.
    mv -T "$new/packages" "$folder" 2> /dev/null || [ -x "$nvcc" ]
fi
echo "$nvcc"
