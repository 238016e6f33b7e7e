#!/usr/bin/env bash
# Builds the programs that images are made of, for this processor: programs.sh FOLDER [PROFILE]. PROFILE is one of Cargo.toml:
# * images (the default): linked statically against musl, so an image needs nothing else, and nothing in it can be replaced;
# * dev: those that tests run beside images, which are there already, with this system's C library in FOLDER/libraries.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
folder=$1
profile=${2:-images}
cd "$(dirname "$0")/.."
packages=(reprise-agent reprise-controlplane reprise-operator reprise)
mkdir -p "$folder/libraries"
case $profile in
    dev)
        # With all others, which have features in common with them: as whoever runs tests builds them.
        cargo build --locked --workspace --bins >&2
        built=${CARGO_TARGET_DIR:-target}/debug ;;
    *)
        . images/toolchain.sh
        cargo build --locked --profile "$profile" --target "$target" --bins "${packages[@]/#/--package=}" >&2
        built=${CARGO_TARGET_DIR:-target}/$target/$profile ;;
esac
for program in "${packages[@]}"; do
    if [ "$profile" = dev ]; then
        # The interpreter and what it loads, each where the program looks for it.
        ldd "$built/$program" | sed -nE 's|^.*[[:space:]](/[^ ]+) \(0x.*$|\1|p' | while read -r library; do
            install -D "$library" "$folder/libraries$library"
        done
    elif readelf --program-headers "$built/$program" | grep -q INTERP; then
        # A program that asks for an interpreter would not start in an empty image.
        echo "$built/$program is not linked statically" >&2
        exit 1
    fi
    # Line tables of the standard library help nobody in a container.
    objcopy --strip-debug "$built/$program" "$folder/$program"
    echo "$folder/$program"
done
