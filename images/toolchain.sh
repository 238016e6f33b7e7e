# Source this file at the root of the tree to build programs for images. It sets `target` for Rust and makes
# sure that musl-gcc is available for the C code of dependencies. It installs both where permitted.
target=$(uname -m)-unknown-linux-musl

if ! rustc --print target-libdir --target "$target" 2> /dev/null | xargs -I{} test -d {}; then
    rustup target add "$target" >&2 ||
        { echo "images need Rust's target $target: rustup target add $target" >&2; exit 1; }
fi
if ! command -v musl-gcc > /dev/null; then
    apt-get install -y musl-tools >&2 ||
        { echo "images need musl-gcc for the C code of dependencies: install musl-tools" >&2; exit 1; }
fi
