# Sourced, at the root of the tree, by what builds programs for images: afterwards Rust builds for $target, and musl-gcc compiles the C of
# dependencies. Both are installed where that may be done.
target=$(uname -m)-unknown-linux-musl

if ! rustc --print target-libdir --target "$target" 2> /dev/null | xargs -I{} test -d {}; then
    rustup target add "$target" >&2 ||
        { echo "images need Rust's target $target: rustup target add $target" >&2; exit 1; }
fi
if ! command -v musl-gcc > /dev/null; then
    apt-get install -y musl-tools >&2 ||
        { echo "images need musl-gcc, which compiles the C of dependencies: install musl-tools" >&2; exit 1; }
fi
