#!/usr/bin/env bash
# Builds the programs that images are made of, for this processor and without a C library of the system: programs.sh FOLDER [PROFILE].
# PROFILE is one of Cargo.toml: images (the default), or images-test, which is quicker to build and slower to run.
# Everything is linked statically against musl, so an image needs nothing else, and nothing in it can be replaced.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
folder=$1
profile=${2:-images}
cd "$(dirname "$0")/.."
. images/toolchain.sh

packages=(reprise-agent reprise-controlplane reprise-operator reprise)
cargo build --locked --profile "$profile" --target "$target" --bins "${packages[@]/#/--package=}" >&2
mkdir -p "$folder"
for program in "${packages[@]}"; do
    built=${CARGO_TARGET_DIR:-target}/$target/$profile/$program
    # A program that asks for an interpreter would not start in an empty image.
    if readelf --program-headers "$built" | grep -q INTERP; then
        echo "$built is not linked statically" >&2
        exit 1
    fi
    # Line tables of the standard library help nobody in a container.
    objcopy --strip-debug "$built" "$folder/$program"
    echo "$folder/$program"
done
