#!/usr/bin/env bash
# Checks manifests with kube-score: score.sh [FILE...]. Without files, it checks what the chart renders with its
# defaults. `-` reads standard input, for example the objects of a cluster:
#     kubectl get deployments,daemonsets,statefulsets,services,networkpolicies,poddisruptionbudgets \
#         --namespace reprise-system --output yaml | e2e/kube-score/score.sh -
# Fails on every finding that accepted.txt does not explain.
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
score=$("$folder/build.sh")
if [ $# -eq 0 ]; then
    helm=$("$folder/../helm/build.sh")
    manifests=$(mktemp)
    trap 'rm -f "$manifests"' EXIT
    "$helm" template reprise "$folder/../../charts/reprise" --namespace reprise-system > "$manifests"
    set -- "$manifests"
fi
# kube-score fails on findings, too. It prints no result if it cannot read the manifests.
results=$("$score" score --output-format ci "$@" || true)
passed=$(grep -c '^\[OK\]' <<< "$results" || true)
if [ "$passed" -eq 0 ]; then
    echo "kube-score has checked nothing: are these manifests of Kubernetes objects?" >&2
    exit 1
fi
findings=$(grep -E '^\[(CRITICAL|WARNING)\]' <<< "$results" || true)
open=$(grep -vE -f <(grep -v '^#' "$folder/accepted.txt") <<< "$findings" | grep . || true)
echo "kube-score: $passed checks passed, $(grep -c . <<< "$findings" || true) findings, of which accepted.txt explains" \
    "all but $(grep -c . <<< "$open" || true)"
if [ -n "$open" ]; then
    echo "$open"
    exit 1
fi
