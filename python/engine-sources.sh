#!/usr/bin/env bash
# Fetches the Python sources of an engine at the version that its adapter is made for, without what is compiled, into the
# cache folder: engine-sources.sh vllm|sglang. Its tests import the engine's real classes from there. Prints the folder.
# Exit status 3: they cannot be had here, and why, on standard error.
set -euo pipefail
cd "$(dirname "$0")"
case ${1:-} in
    vllm) version=0.33.0 size="336 MB" keep='vllm/*.py' what=sources ;;
    # All but what is compiled: it looks for sources of kernels when it is imported, and compiles its page hash.
    sglang) version=0.5.23 size="39 MB" keep='sglang/*[!o] sglang/*[!s]o' what=package ;;
    *) echo "engine-sources.sh vllm|sglang" >&2; exit 2 ;;
esac
engine=$1
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
home=$cache/$engine-$version-$what
if [ ! -e "$home" ]; then
    refuse() { printf '%s\n' "the sources of $engine $version cannot be had: $1" >&2; exit 3; }
    [ "$(uname -m)" = x86_64 ] || refuse "its wheel is for x86-64 here"
    venv=$(./venv.sh) || refuse "there is no Python for it"
    mkdir -p "$cache"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 1000 ] || refuse "$cache has $free MiB left, 1000 are needed meanwhile"
    printf '%s\n' "fetching the sources of $engine $version: a wheel of $size, once" >&2
    part=$(mktemp -d "$cache/$engine-sources.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    # A wheel for the engine's Python, which need not be this one: nothing of it is installed.
    "$venv/bin/pip" -q download --no-deps --no-cache-dir --only-binary :all: --python-version 3.11 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_34_x86_64 --dest "$part" "$engine==$version" >&2 ||
        refuse "pip failed"
    "$venv/bin/python" - "$part" "$keep" >&2 << 'PYTHON' || refuse "the wheel cannot be unpacked"
import fnmatch, pathlib, sys, zipfile

part, keep = pathlib.Path(sys.argv[1]), sys.argv[2].split()
(wheel,) = part.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if any(fnmatch.fnmatch(name, pattern) for pattern in keep)]
    archive.extractall(part / "sources", names)
PYTHON
    # Whole or not at all; whoever else has fetched them meanwhile has the same.
    chmod 755 "$part/sources"
    mv -T "$part/sources" "$home" 2> /dev/null || [ -e "$home" ] || refuse "$home cannot be made"
fi
echo "$home"
