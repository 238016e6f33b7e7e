#!/usr/bin/env bash
# Prints the path of promtool, which checks metrics in the tests: the machine's own, or that of Debian's
# package `prometheus`. The package is only unpacked into the cache folder, since its installation would start
# a server.
set -euo pipefail
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
binary=$cache/bin/promtool
if command -v promtool > /dev/null; then
    command -v promtool
    exit
fi
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    folder=$(mktemp -d "$cache/promtool.XXXXXX")
    trap 'rm -rf "$folder"' EXIT
    cd "$folder"
    # The package lists may be outdated or missing.
    { apt-get download prometheus || { apt-get update && apt-get download prometheus; }; } >&2 || {
        echo "promtool is missing, and Debian's package prometheus cannot be downloaded: install promtool" >&2
        exit 1
    }
    dpkg-deb --extract prometheus_*.deb .
    mv usr/bin/promtool "$binary"
fi
echo "$binary"
