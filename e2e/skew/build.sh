#!/usr/bin/env bash
# Builds the images of an older commit of this project, as those of the minor version before this one, and prints archive, size and name of each:
# build.sh COMMIT. Commits between releases have one version, so theirs is made another one: what is compared is what processes say.
#
# Once for a commit; what is fetched and built lies in the cache folder. With nothing there it takes as long as all programs and tests do.
set -euo pipefail
shopt -s inherit_errexit
[ $# -eq 1 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")/../.."
version() { sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml; }
commit=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "there is no commit '$1' here" >&2; exit 2; }
IFS=. read -r major minor _ <<< "$(version)"
[ "$minor" -gt 0 ] || { echo "no minor version comes before $(version)" >&2; exit 2; }
older=$major.$((minor - 1)).0

# A cache of its own: who builds other images need not wait for these. What etcd's is made of is the same.
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
# Its own packages in the lock file, which are those without a source.
sed -i "/^name = \"reprise/{n;s/^version = \"$was\"/version = \"$older\"/}" Cargo.lock
images/build.sh --profile dev
