#!/usr/bin/env bash
# Builds kwok, which simulates nodes in the scale test, into the cache folder. Prints the path of the binary.
# The first build takes minutes. kwok's go.mod pins its dependencies, and Go checks every module against the
# public checksum database. So this folder needs no go.mod.
set -euo pipefail
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=v0.8.0
binary=$cache/bin/kwok-$version
cd "$(dirname "$0")"
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # A concurrent run waits for this build and then uses it.
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
