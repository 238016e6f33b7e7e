#!/usr/bin/env bash
# Builds kwok, which plays the nodes that nobody runs in tests of scale, into the cache folder. Prints the path of the binary. It takes
# minutes, once. Its own go.mod says what it is made of, and Go checks every module against the public checksum database; nothing here
# requires it beside something else, so there is no module of ours.
set -euo pipefail
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=v0.8.0
binary=$cache/bin/kwok-$version
cd "$(dirname "$0")"
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # Whoever comes while another builds waits, and finds it built.
    exec {lock}> "$cache/bin/kwok.lock"
    flock "$lock"
    what=kwok
    . ../go.sh
    if [ ! -x "$binary" ]; then
        echo "building kwok $version, which takes minutes" >&2
        new=$cache/bin/kwok.new
        rm -rf "$new"
        GOBIN=$new go install -trimpath -ldflags "-s -w" "sigs.k8s.io/kwok/cmd/kwok@$version" >&2
        mv "$new/kwok" "$binary"
        rmdir "$new"
    fi
fi
echo "$binary"
