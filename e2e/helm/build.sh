#!/usr/bin/env bash
# Builds the Helm that tests run, from its Go module (go.mod and go.sum beside this file), into the cache folder: 4 minutes on two
# cores, once. Prints the path of the binary.
set -euo pipefail
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require helm.sh/helm/v4 ||p' go.mod)
helm=$cache/bin/helm-$version
if [ ! -x "$helm" ]; then
    mkdir -p "$cache/bin"
    # Whoever comes while another builds waits, and finds it built.
    exec {lock}> "$cache/bin/helm.lock"
    flock "$lock"
    if [ ! -x "$helm" ]; then
        what=Helm
        . ../go.sh
        echo "building helm $version, which takes minutes" >&2
        version_of=helm.sh/helm/v4/internal/version.version
        go build -trimpath -ldflags "-s -w -X $version_of=$version" -o "$helm.new" helm.sh/helm/v4/cmd/helm >&2
        mv "$helm.new" "$helm"
    fi
fi
echo "$helm"
