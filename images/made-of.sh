# Source this file at the root of the tree. It sets `inputs`, the files of the tree that go into images, and
# defines `made_of PROFILE`, which prints everything that determines their content, one item per line.
# Builds with equal output make equal images, in any checkout.

# Only files that affect images. The inputs of etcd are part of its program's name (etcd.sh).
inputs=(Cargo.toml Cargo.lock Dockerfile images policy proto cuda daemon identity node-agent controlplane crds operator simulator testkit cli bench/Cargo.toml e2e/Cargo.toml fuzz/Cargo.toml e2e/etcd e2e/go.sh xtask/src/sbom.rs)
for input in .cargo rust-toolchain rust-toolchain.toml; do
    if [ -e "$input" ]; then inputs+=("$input"); fi
done

# Variables that change the compilers' output, not those that only change paths. Cargo sets PROTOC for its
# processes, from .cargo/config.toml.
flags='^(RUSTFLAGS|CARGO_ENCODED_RUSTFLAGS|CARGO_INCREMENTAL|CARGO_(PROFILE|UNSTABLE)_[^=]*|CARGO_BUILD_(RUST[^=]*|TARGET)'
flags+='|CARGO_TARGET_[^=]*_(LINKER|RUSTFLAGS)|RUSTC[^=]*|(HOST_|TARGET_)?(CC|CXX|AR|CFLAGS|CXXFLAGS|ARFLAGS|CPPFLAGS)(_[^=]*)?'
flags+='|SOURCE_DATE_EPOCH)='

# Cargo configurations above the tree and of the user: they may contain flags as well.
configurations() {
    local folder=$PWD file
    while [ "$folder" != / ]; do
        folder=$(dirname "$folder")
        printf '%s\n' "${folder%/}/.cargo/config" "${folder%/}/.cargo/config.toml"
    done
    for file in config config.toml; do printf '%s\n' "${CARGO_HOME:-$HOME/.cargo}/$file"; done
}

# Prints the first line of a program's output, or that the program is missing.
first_line() { { "$@" 2> /dev/null || echo "no $1"; } | sed -n 1p; }

made_of() {
    echo "profile $1"
    rustc --version --verbose
    first_line cargo --version
    if [ "$1" = dev ]; then
        first_line ldd --version
    else
        first_line musl-gcc --version
    fi
    # The versions of programs do not determine those of the libraries.
    dpkg-query --show libc6 libgcc-s1 musl musl-dev musl-tools 2> /dev/null || true
    first_line objcopy --version
    first_line buildah --version
    env | { LC_ALL=C grep -E "$flags" || true; } | LC_ALL=C sort
    configurations | LC_ALL=C sort -u | while read -r file; do
        if [ -f "$file" ]; then echo "configuration $(sha256sum < "$file")"; fi
    done
    find "${inputs[@]}" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}
