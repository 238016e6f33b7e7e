#!/bin/sh
# protoc for the build scripts of dependencies (etcd-client), without a system protoc: protox, which is pure Rust, built
# once into the cache folder. `.cargo/config.toml` names this script as PROTOC.
set -eu
version=0.10.0
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
protox=$cache/bin/protox-$version
if [ ! -x "$protox" ]; then
    mkdir -p "$cache/bin"
    # A separate folder: concurrent builds may get here, and the last one wins.
    work=$(mktemp -d "$cache/protox.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    env -u RUSTC_WRAPPER -u CARGO_ENCODED_RUSTFLAGS CARGO_TARGET_DIR="$work/target" \
        cargo install --quiet --locked --debug --features bin --root "$work" "protox@$version" >&2
    mv "$work/bin/protox" "$protox"
    rm -rf "$work"
fi
exec "$protox" "$@"
