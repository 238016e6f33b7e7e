#!/usr/bin/env bash
# Builds the programs that images are made of, for this processor and without a C library of the system: programs.sh FOLDER.
# Everything is linked statically against musl, so an image needs nothing else, and nothing in it can be replaced.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
folder=$1
cd "$(dirname "$0")/.."
target=$(uname -m)-unknown-linux-musl

if ! rustc --print target-libdir --target "$target" 2> /dev/null | xargs -I{} test -d {}; then
    rustup target add "$target" >&2 ||
        { echo "images need Rust's target $target: rustup target add $target" >&2; exit 1; }
fi
if ! command -v musl-gcc > /dev/null; then
    apt-get install -y musl-tools >&2 ||
        { echo "images need musl-gcc, which compiles the C of dependencies: install musl-tools" >&2; exit 1; }
fi

packages=(reprise-agent reprise-controlplane reprise-operator reprise)
cargo build --locked --profile images --target "$target" --bins "${packages[@]/#/--package=}" >&2
mkdir -p "$folder"
for program in "${packages[@]}"; do
    built=${CARGO_TARGET_DIR:-target}/$target/images/$program
    # A program that asks for an interpreter would not start in an empty image.
    if readelf --program-headers "$built" | grep -q INTERP; then
        echo "$built is not linked statically" >&2
        exit 1
    fi
    # Line tables of the standard library help nobody in a container.
    objcopy --strip-debug "$built" "$folder/$program"
    echo "$folder/$program"
done
