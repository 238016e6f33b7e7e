#!/usr/bin/env bash
# Builds the name server of the tests' clusters from its Go module (go.mod and go.sum beside this file) into the cache folder.
# Prints the path of the binary. It takes minutes, once.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require github.com/coredns/coredns ||p' go.mod)
binary=$cache/bin/coredns-$version
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # Whoever comes while another builds waits, and finds it built.
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
