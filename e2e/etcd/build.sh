#!/usr/bin/env bash
# Builds the etcd of the tests from its Go module (go.mod and go.sum in this folder) into the cache folder.
# Prints the path of the binary.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require go.etcd.io/etcd/server/v3 ||p' go.mod)
etcd=$cache/bin/etcd-$version
if [ ! -x "$etcd" ]; then
    mkdir -p "$cache/bin"
    what=etcd
    . ../go.sh
    # The same flags as for the image of etcd, so that both builds share Go's build cache.
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$etcd.new" go.etcd.io/etcd/server/v3 >&2
    mv "$etcd.new" "$etcd"
fi
echo "$etcd"
