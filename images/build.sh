#!/usr/bin/env bash
# Builds all images without a daemon, each into an OCI archive in the cache folder, and prints archive, size and name of each.
# They are those of the Dockerfile: its stages that compile are replaced by folders with programs that were built here, so
# nothing is fetched and nothing runs in a container. Two builds of one source with one toolchain give images of one digest; a
# second build of the same commit does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
images=(reprise-agent reprise-controlplane reprise-operator reprise reprise-etcd)

# All that images are made of, and nothing that changes without them.
inputs=(Cargo.toml Cargo.lock Dockerfile images policy proto node-agent controlplane crds operator simulator cli e2e/etcd e2e/go.sh)
digest() {
    { rustc --version --verbose; find "${inputs[@]}" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum; } | sha256sum
}

archive_of() { echo "$cache/images/$1-$version.tar"; }

tell() {
    for image in "${images[@]}"; do
        archive=$(archive_of "$image")
        printf '%s  %s KiB  %s\n' "$archive" "$(($(stat -c %s "$archive") / 1024))" "localhost/$image:$version"
    done
}

all_there() {
    for image in "${images[@]}"; do
        [ -f "$(archive_of "$image")" ] || return 1
    done
    [ "$(cat "$cache/images/made-of" 2> /dev/null)" = "$made_of" ]
}

mkdir -p "$cache/images"
exec {lock}> "$cache/images/lock"
flock "$lock"
# Commit and time are those of the last change of what images are made of, not of the build.
labels=()
if [ -z "$(git status --porcelain -- "${inputs[@]}" 2> /dev/null)" ] &&
    revision=$(git log -1 --format=%H -- "${inputs[@]}" 2> /dev/null) && [ -n "$revision" ]; then
    labels=(--label "org.opencontainers.image.revision=$revision")
fi
moment=$(git log -1 --format=%ct -- "${inputs[@]}" 2> /dev/null || true)
sources=$(digest)
made_of="$sources ${labels[*]} $moment"
if all_there; then
    tell
    exit
fi
rm -f "$cache/images/made-of"

if ! command -v buildah > /dev/null; then
    apt-get install -y --no-install-recommends buildah >&2 ||
        { echo "images are built by buildah 1.27 or later: install it" >&2; exit 1; }
fi

# What stages of the Dockerfile are replaced by: folders with the path that is copied from them.
stages=$cache/images/stages
rm -rf "$stages"
mkdir -p "$stages"/{programs,etcd}/programs
images/programs.sh "$stages/programs/programs" > /dev/null
cp "$(images/etcd.sh)" "$stages/etcd/programs/reprise-etcd"

# Nothing is kept of the storage: layers are made of one file each.
storage=$(mktemp -d "$cache/images/storage.XXXXXX")
trap 'rm -rf "$storage" "$stages"' EXIT
run=(buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs)

for image in "${images[@]}"; do
    name=localhost/$image:$version
    archive=$(archive_of "$image")
    "${run[@]}" build --quiet --isolation chroot --timestamp "${moment:-0}" --build-arg "VERSION=$version" "${labels[@]}" \
        --build-context "programs=$stages/programs" --build-context "etcd=$stages/etcd" \
        --target "$image" --tag "$name" --file Dockerfile images > /dev/null
    rm -f "$archive"
    "${run[@]}" push --quiet "$name" "oci-archive:$archive:$name" > /dev/null
done
# What was edited during the build is built again the next time.
[ "$(digest)" = "$sources" ] && echo "$made_of" > "$cache/images/made-of"
tell
