#!/usr/bin/env bash
# Builds Helm from its Go module (go.mod and go.sum in this folder) into the cache folder. Prints the path of
# the binary. The first build takes minutes.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require helm.sh/helm/v4 ||p' go.mod)
binary=$cache/bin/helm-$version
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    # A concurrent run waits for this build and then uses it.
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
