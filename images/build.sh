#!/usr/bin/env bash
# Builds all images without a daemon, each into an OCI archive in the cache folder, and prints archive, size and name of each.
# They are those of the Dockerfile: its stages that compile are replaced by folders with programs that were built here, so
# nothing is fetched and nothing runs in a container. Two builds of one commit with one toolchain give images of one digest.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)

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
trap 'rm -rf "$storage"' EXIT
run=(buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs)
labels=()
if [ -z "$(git status --porcelain 2> /dev/null)" ] && revision=$(git rev-parse HEAD 2> /dev/null); then
    labels=(--label "org.opencontainers.image.revision=$revision")
fi
# The time of the commit, not that of the build.
moment=$(git log -1 --format=%ct 2> /dev/null || echo 0)

images=(reprise-agent reprise-controlplane reprise-operator reprise reprise-etcd)
for image in "${images[@]}"; do
    name=localhost/$image:$version
    archive=$cache/images/$image-$version.tar
    "${run[@]}" build --quiet --isolation chroot --timestamp "$moment" --build-arg "VERSION=$version" "${labels[@]}" \
        --build-context "programs=$stages/programs" --build-context "etcd=$stages/etcd" \
        --target "$image" --tag "$name" --file Dockerfile images > /dev/null
    rm -f "$archive"
    "${run[@]}" push --quiet "$name" "oci-archive:$archive:$name" > /dev/null
    printf '%s  %s KiB  %s\n' "$archive" "$(($(stat -c %s "$archive") / 1024))" "$name"
done
