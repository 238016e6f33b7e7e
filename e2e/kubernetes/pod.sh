#!/usr/bin/env bash
# Builds the program of the tests' own pods (e2e/src/bin/reprise-e2e-pod.rs) into the cache folder. It is
# static, since their images contain no other file. Prints its path.
set -euo pipefail
cd "$(dirname "$0")/../src/bin"
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
source=reprise-e2e-pod.rs
digest=$(sha256sum "$source" | cut -c 1-12)
binary=$cache/bin/pod-$digest
if [ ! -x "$binary" ]; then
    mkdir -p "$cache/bin"
    new=$binary.$$.new
    # The linker warns about name resolution in a static program. Since glibc 2.34 all of it is in libc
    # itself.
    "${RUSTC:-rustc}" --edition 2024 -O -C target-feature=+crt-static -C panic=abort -C strip=symbols --crate-name pod \
        "$source" -o "$new" >&2
    mv "$new" "$binary"
fi
echo "$binary"
