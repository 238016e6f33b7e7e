#!/usr/bin/env bash
# Fetches the Python sources of an engine, at the adapter's version and without compiled files, into the cache folder,
# for tests that import the engine's real classes: engine-sources.sh vllm|sglang. Prints the folder.
# Exit status 3: they cannot be fetched here; the reason is on standard error.
set -euo pipefail
cd "$(dirname "$0")"
case ${1:-} in
    vllm) version=0.33.0 size="336 MB" keep='vllm/*.py' what=sources ;;
    # Everything except compiled files: at import, it searches sources of kernels and compiles its page hash.
    sglang) version=0.5.23 size="39 MB" keep='sglang/*[!o] sglang/*[!s]o' what=package ;;
    *) echo "usage: engine-sources.sh vllm|sglang" >&2; exit 2 ;;
esac
engine=$1
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
home=$cache/$engine-$version-$what
if [ ! -e "$home" ]; then
    refuse() { printf '%s\n' "the sources of $engine $version cannot be fetched: $1" >&2; exit 3; }
    [ "$(uname -m)" = x86_64 ] || refuse "its wheel needs x86-64"
    venv=$(./venv.sh) || refuse "a suitable Python is missing"
    mkdir -p "$cache"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 1000 ] || refuse "$cache has $free MiB free, 1000 are needed during the download"
    printf '%s\n' "fetching the sources of $engine $version once (a wheel of $size)" >&2
    part=$(mktemp -d "$cache/$engine-sources.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    # A wheel for the engine's Python, which may differ from this one, because nothing is installed.
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
    # Atomic; a concurrent run has fetched the same files.
    chmod 755 "$part/sources"
    mv -T "$part/sources" "$home" 2> /dev/null || [ -e "$home" ] || refuse "$home cannot be created"
fi
echo "$home"
