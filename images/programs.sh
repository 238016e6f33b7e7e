#!/usr/bin/env bash
# Builds the programs of the images for this processor: programs.sh FOLDER [PROFILE]. PROFILE is one of
# Cargo.toml:
# * images (the default): statically linked with musl, so that an image needs nothing else (selection.sh);
# * dev: the programs that tests run, which are already built, with this system's C library in
#   FOLDER/libraries.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n '2,6s/^# //p' "$0" >&2; exit 2; }
folder=$1
profile=${2:-images}
cd "$(dirname "$0")/.."
. images/selection.sh
select_for "$profile"
mkdir -p "$folder/libraries"
executables() { sed -n 's/.*"executable":"\([^"]*\)".*/\1/p'; }
case $profile in
    # Built as in the Makefile, with a test, so that features are equal: one that does not build images
    # itself, which would replace it while it runs.
    dev) build=(cargo build --locked --workspace --bins --test protocol_document --message-format json-render-diagnostics) ;;
    *)
        . images/toolchain.sh
        build=(cargo build --locked --profile "$profile" --bins "${selection[@]}" --message-format json-render-diagnostics) ;;
esac
# Ask Cargo for the paths: a configuration may set another target.
built=$("${build[@]}" | executables)
for program in "${packages[@]}"; do
    path=$(grep "/$program\$" <<< "$built")
    if [ "$profile" = dev ]; then
        # The interpreter and its libraries, each at the path where the program expects it.
        ldd "$path" | sed -nE 's|^.*[[:space:]](/[^ ]+) \(0x.*$|\1|p' | while read -r library; do
            install -D "$library" "$folder/libraries$library"
        done
    elif readelf --program-headers "$path" | grep -q INTERP; then
        # A program with an interpreter would not start in an empty image.
        echo "$path is not linked statically" >&2
        exit 1
    fi
    cp "$path" "$folder/$program"
done
# Another checkout may build into the same folder: check that the copied programs are from this one.
"${build[@]}" > /dev/null
for program in "${packages[@]}"; do
    cmp "$(grep "/$program\$" <<< "$built")" "$folder/$program" >&2
    # Line tables of the standard library are not useful in a container.
    objcopy --strip-debug "$folder/$program"
    echo "$folder/$program"
done
