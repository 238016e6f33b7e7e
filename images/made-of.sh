# Sourced, at the root of the tree: `inputs`, the files of the tree that images are made of, and `made_of PROFILE`, which prints all that
# decides what is in them, a line each. Two builds for which it prints the same make the same images, in whatever checkout.

# Nothing that changes without the images. What etcd's is built from stands in the name of the program (etcd.sh).
inputs=(Cargo.toml Cargo.lock Dockerfile images policy proto daemon node-agent controlplane crds operator simulator cli e2e/Cargo.toml e2e/etcd e2e/go.sh)
for input in .cargo rust-toolchain rust-toolchain.toml; do
    if [ -e "$input" ]; then inputs+=("$input"); fi
done

# Variables that change what compilers make, and none that merely say where. Cargo sets PROTOC for what it runs, from .cargo/config.toml.
flags='^(RUSTFLAGS|CARGO_ENCODED_RUSTFLAGS|CARGO_INCREMENTAL|CARGO_(PROFILE|UNSTABLE)_[^=]*|CARGO_BUILD_(RUST[^=]*|TARGET)'
flags+='|CARGO_TARGET_[^=]*_(LINKER|RUSTFLAGS)|RUSTC[^=]*|(HOST_|TARGET_)?(CC|CXX|AR|CFLAGS|CXXFLAGS|ARFLAGS|CPPFLAGS)(_[^=]*)?'
flags+='|SOURCE_DATE_EPOCH)='

# Configurations of Cargo above the tree and of the user: they may have flags as well.
configurations() {
    local folder=$PWD file
    while [ "$folder" != / ]; do
        folder=$(dirname "$folder")
        printf '%s\n' "${folder%/}/.cargo/config" "${folder%/}/.cargo/config.toml"
    done
    for file in config config.toml; do printf '%s\n' "${CARGO_HOME:-$HOME/.cargo}/$file"; done
}

# First line of what a program says, or that it is not there.
says() { { "$@" 2> /dev/null || echo "no $1"; } | sed -n 1p; }

made_of() {
    echo "profile $1"
    rustc --version --verbose
    says cargo --version
    if [ "$1" = dev ]; then
        says ldd --version
    else
        says musl-gcc --version
    fi
    # Programs' versions say nothing of the libraries'.
    dpkg-query --show libc6 libgcc-s1 musl musl-dev musl-tools 2> /dev/null || true
    says objcopy --version
    says buildah --version
    env | { LC_ALL=C grep -E "$flags" || true; } | LC_ALL=C sort
    configurations | LC_ALL=C sort -u | while read -r file; do
        if [ -f "$file" ]; then echo "configuration $(sha256sum < "$file")"; fi
    done
    find "${inputs[@]}" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}
