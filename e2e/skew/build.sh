#!/usr/bin/env bash
# Builds the images of an older commit with the version number of the previous minor version: build.sh COMMIT.
# Prints archive, size and name of each image. Commits between releases share a version, but the tests need
# processes that report two.
#
# Each commit is built once, into the cache folder. The first build takes as long as building all programs.
set -euo pipefail
shopt -s inherit_errexit
[ $# -eq 1 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/../.."
version() { sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml; }
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "unknown commit '$1'" >&2; exit 2; }
IFS=. read -r major minor _ <<< "$(version)"
[ "$minor" -gt 0 ] || { echo "version $(version) has no previous minor version" >&2; exit 2; }
older=$major.$((minor - 1)).0

# A separate cache, so that builds of other images need not wait for this one. Both share the binaries of Go
# programs.
shared=${REPRISE_CACHE:-$HOME/.cache/reprise}
cache=$shared/skew
mkdir -p "$shared/bin" "$cache"
ln -sfn "$shared/bin" "$cache/bin"
export REPRISE_CACHE=$cache CARGO_TARGET_DIR=$cache/target
tree=$cache/$commit
if [ ! -d "$tree" ]; then
    rm -rf "$tree.new"
    mkdir "$tree.new"
    git archive "$commit" | tar -x -C "$tree.new"
    mv "$tree.new" "$tree"
fi
cd "$tree"
was=$(version)
sed -i "/^\[workspace.package\]/,/^\$/s/^version = \"$was\"/version = \"$older\"/" Cargo.toml
# The workspace's packages in the lock file.
sed -i "/^name = \"\(reprise\|xtask\)/{n;s/^version = \"$was\"/version = \"$older\"/}" Cargo.lock
images/build.sh --profile dev
