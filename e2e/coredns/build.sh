#!/usr/bin/env bash
# Builds the name server of the tests' clusters from its Go module (go.mod and go.sum in this folder) into the
# cache folder. Prints the path of the binary. The first build takes minutes.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require github.com/coredns/coredns ||p' go.mod)
binary=$cache/bin/coredns-$version
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # A concurrent run waits for this build and then uses it.
    exec {lock}> "$cache/bin/coredns.lock"
    flock "$lock"
    what=CoreDNS
    . ../go.sh
    if [ ! -x "$binary" ]; then
        echo "building coredns $version, which takes minutes" >&2
        go build -trimpath -ldflags "-s -w" -o "$binary.new" . >&2
        mv "$binary.new" "$binary"
    fi
fi
echo "$binary"
