#!/usr/bin/env bash
# Builds the etcd of the tests without cgo, because the one that tests run may link the system's C library.
# Prints the path of the program, which contains a hash of its inputs: go.mod, go.sum, the version of Go and
# its settings.
set -euo pipefail
# Number of the most recently used programs kept.
kept=3
cd "$(dirname "$0")/../e2e/etcd"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require go.etcd.io/etcd/server/v3 ||p' go.mod)
what=etcd
. ../go.sh
settings=$(go env GOOS GOARCH GOAMD64 GOARM64 GOFLAGS GOEXPERIMENT)
key=$({ go version; echo "$settings"; sha256sum go.mod go.sum tools.go; sha256sum < ../../images/etcd.sh; } | sha256sum | cut -c 1-12)
etcd=$cache/bin/etcd-$version-static-$key
if [ ! -x "$etcd" ]; then
    mkdir -p "$cache/bin"
    new=$etcd.$$.new
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$new" go.etcd.io/etcd/server/v3 >&2
    mv "$new" "$etcd"
fi
touch "$etcd"
find "$cache/bin" -maxdepth 1 -name 'etcd-*-static-*' ! -name '*.new' -printf '%T@ %p\n' | sort -rn | cut -d ' ' -f 2- |
    tail -n "+$((kept + 1))" | xargs -r -d '\n' rm -f
echo "$etcd"
