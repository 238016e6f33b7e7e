#!/usr/bin/env bash
# Prints the bill of materials of an image's program, CycloneDX 1.5 in JSON: sbom.sh IMAGE PROFILE [PROGRAM]. PROGRAM is the
# path of the built etcd, whose modules are read from it; the crates of other images come from Cargo.lock and the features of
# PROFILE.
set -euo pipefail
[ $# -eq 2 ] || [ $# -eq 3 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/.."
if [ "$1" = reprise-etcd ]; then
    cargo xtask sbom go "${3:?the path of etcd}"
else
    . images/selection.sh
    select_for "$2"
    cargo xtask sbom crate "$1" "${selection[@]}"
fi
