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
executables() { sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'; }
case $profile in
    # As whoever runs tests builds them: with some test (Makefile), and not one that asks for images itself, which would be replaced while it runs.
    dev) build=(cargo build --locked --workspace --bins --test tidy --message-format json-render-diagnostics) ;;
    *)
        . images/toolchain.sh
        build=(cargo build --locked --profile "$profile" --target "$target" --bins "${packages[@]/#/--package=}"
            --message-format json-render-diagnostics) ;;
esac
# Where they are is cargo's to say: configurations may have a target of their own.
built=$("${build[@]}" | executables)
for program in "${packages[@]}"; do
    path=$(grep "/$program\$" <<< "$built")
    if [ "$profile" = dev ]; then
        # The interpreter and what it loads, each where the program looks for it.
        ldd "$path" | sed -nE 's|^.*[[:space:]](/[^ ]+) \(0x.*$|\1|p' | while read -r library; do
            install -D "$library" "$folder/libraries$library"
        done
    elif readelf --program-headers "$path" | grep -q INTERP; then
        # A program that asks for an interpreter would not start in an empty image.
        echo "$path is not linked statically" >&2
        exit 1
    fi
    cp "$path" "$folder/$program"
done
# Other checkouts may build into the same folder: what was copied is what this one builds.
"${build[@]}" > /dev/null
for program in "${packages[@]}"; do
    cmp "$(grep "/$program\$" <<< "$built")" "$folder/$program" >&2
    # Line tables of the standard library help nobody in a container.
    objcopy --strip-debug "$folder/$program"
    echo "$folder/$program"
done
