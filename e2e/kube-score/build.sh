#!/usr/bin/env bash
# Builds kube-score, which checks manifests, into the cache folder. Prints the path of the binary.
# The first build takes minutes. Its go.mod pins its dependencies, and Go checks every module against the
# public checksum database. So this folder needs no go.mod.
set -euo pipefail
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=v1.20.0
binary=$cache/bin/kube-score-$version
cd "$(dirname "$0")"
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # A concurrent run waits for this build and then uses it.
    exec {lock}> "$cache/bin/kube-score.lock"
    flock "$lock"
    what=kube-score
    . ../go.sh
    if [ ! -x "$binary" ]; then
        echo "building kube-score $version, which takes minutes" >&2
        new=$cache/bin/kube-score.new
        rm -rf "$new"
        GOBIN=$new go install -trimpath -ldflags "-s -w" "github.com/zegl/kube-score/cmd/kube-score@$version" >&2
        mv "$new/kube-score" "$binary"
        rmdir "$new"
    fi
fi
echo "$binary"
