#!/usr/bin/env bash
# Builds commands of Kubernetes from its Go modules (go.mod and go.sum in this folder) into the cache folder:
# build.sh COMMAND…, for example `build.sh kube-apiserver`; tools.go lists the commands. Prints the path of
# each binary on its own line, in the given order. The API server takes 8 minutes on two cores; existing
# binaries are not built again.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
version=$(sed -n 's|^require k8s.io/kubernetes ||p' go.mod)

binary() { echo "$cache/bin/$1-$version"; }

missing=()
for command; do
    grep -q "\"k8s.io/kubernetes/cmd/$command\"" tools.go ||
        { echo "$command is not a command of tools.go" >&2; exit 2; }
    [ -x "$(binary "$command")" ] || missing+=("$command")
done

if [ ${#missing[@]} -gt 0 ]; then
    mkdir -p "$cache/bin"
    # A concurrent run waits for this build and then uses it.
    exec {lock}> "$cache/bin/kubernetes.lock"
    flock "$lock"
    what=Kubernetes
    . ../go.sh
    number=${version#v}
    major=${number%%.*} minor=${number#*.}
    stamp=k8s.io/component-base/version
    stamps="-X $stamp.gitVersion=$version -X $stamp.gitMajor=$major -X $stamp.gitMinor=${minor%%.*}"
    for command in "${missing[@]}"; do
        to=$(binary "$command")
        [ ! -x "$to" ] || continue
        echo "building $command $version, which takes minutes" >&2
        go build -trimpath -ldflags "-s -w $stamps" -o "$to.new" "k8s.io/kubernetes/cmd/$command" >&2
        mv "$to.new" "$to"
    done
fi

for command; do binary "$command"; done
