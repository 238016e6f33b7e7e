#!/usr/bin/env bash
# Builds Helm from its Go module (go.mod and go.sum beside this file) into the cache folder. Prints the path of the binary. It
# takes minutes, once.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require helm.sh/helm/v4 ||p' go.mod)
binary=$cache/bin/helm-$version
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # Whoever comes while another builds waits, and finds it built.
    exec {lock}> "$cache/bin/helm.lock"
    flock "$lock"
    what=Helm
    . ../go.sh
    if [ ! -x "$binary" ]; then
        echo "building helm $version, which takes minutes" >&2
        go build -trimpath -ldflags "-s -w" -o "$binary.new" helm.sh/helm/v4/cmd/helm >&2
        mv "$binary.new" "$binary"
    fi
fi
echo "$binary"
