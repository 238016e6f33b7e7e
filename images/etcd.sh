#!/usr/bin/env bash
# Builds the etcd of the tests once more, without cgo: the one that tests run may use the system's C library. Prints its path.
set -euo pipefail
cd "$(dirname "$0")/../e2e/etcd"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require go.etcd.io/etcd/server/v3 ||p' go.mod)
etcd=$cache/bin/etcd-$version-static
if [ ! -x "$etcd" ]; then
    mkdir -p "$cache/bin"
    what=etcd
    . ../go.sh
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$etcd.new" go.etcd.io/etcd/server/v3 >&2
    mv "$etcd.new" "$etcd"
fi
echo "$etcd"
