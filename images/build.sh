#!/usr/bin/env bash
# Builds all images as OCI archives without a daemon, and prints archive, size and name of each: build.sh
# [--profile NAME].
# NAME is a profile of Cargo.toml: images (the default), or dev, whose programs the tests have already built
# (programs.sh).
#
# It builds the Dockerfile, with programs compiled here in place of its compile stages. Nothing is
# downloaded, and nothing runs in a container. Two builds of one source with one toolchain have the same
# digests. The archives' folder is named after a hash of all inputs (made-of.sh), so checkouts share equal
# images and nothing is built twice. Next to each archive is the bill of materials of its program, IMAGE-VERSION.cdx.json.
set -euo pipefail
shopt -s inherit_errexit
# Number of the most recently used folders kept per profile.
kept=3

case $#:${1:-} in
    0:) profile=images ;;
    2:--profile) profile=$2 ;;
    *) sed -n '2,5s/^# //p' "$0" >&2; exit 2 ;;
esac
cd "$(dirname "$0")/.."
if [ "$profile" != images ] && [ "$profile" != dev ]; then
    echo "invalid profile \"$profile\": expected images or dev" >&2
    exit 2
fi
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
version=$(sed -n '/^\[workspace.package\]/,/^$/s/^version = "\(.*\)"/\1/p' Cargo.toml)
images=(reprise-agent reprise-controlplane reprise-operator reprise reprise-etcd)
folder=$cache/images/$profile

if [ "$profile" = images ]; then . images/toolchain.sh; fi
if ! command -v buildah > /dev/null; then
    apt-get install -y --no-install-recommends buildah >&2 ||
        { echo "building images requires buildah 1.27 or later: install it" >&2; exit 1; }
fi
. images/made-of.sh

mkdir -p "$folder"
exec {lock}> "$cache/images/lock"
flock "$lock"

# Commit and time of the last change to the inputs, not of the build.
labels=()
if [ -z "$(git status --porcelain -- "${inputs[@]}" 2> /dev/null)" ] &&
    revision=$(git log -1 --format=%H -- "${inputs[@]}" 2> /dev/null) && [ -n "$revision" ]; then
    labels=(--label "org.opencontainers.image.revision=$revision")
fi
moment=$(git log -1 --format=%ct -- "${inputs[@]}" 2> /dev/null || true)
etcd=$(images/etcd.sh)
whole() { made_of "$profile"; echo "etcd $(sha256sum < "$etcd")"; echo "${labels[*]} $moment $version"; }
of=$(whole)
made=$folder/$(sha256sum <<< "$of" | cut -c 1-16)

finish() {
    # Mark this folder as the most recently used one.
    touch "$made"
    find "$folder" -mindepth 1 -maxdepth 1 -type d ! -name 'new.*' -printf '%T@ %p\n' | sort -rn | cut -d ' ' -f 2- |
        tail -n "+$((kept + 1))" | xargs -r -d '\n' rm -rf
    for image in "${images[@]}"; do
        archive=$made/$image-$version.tar
        printf '%s  %s KiB  %s\n' "$archive" "$(($(stat -c %s "$archive") / 1024))" "localhost/$image:$version"
    done
    exit
}

if [ -d "$made" ]; then finish; fi

# Leftovers of a killed build. The lock excludes other builds.
rm -rf "$folder"/new.*
new=$(mktemp -d "$folder/new.XXXXXX")
trap 'rm -rf "$new"' EXIT

# Folders that replace stages of the Dockerfile, with the paths that it copies from them.
mkdir -p "$new"/programs/programs "$new"/etcd/programs "$new"/archives
images/programs.sh "$new/programs/programs" "$profile" > /dev/null
cp "$etcd" "$new/etcd/programs/reprise-etcd"

# The storage is temporary, because layers contain a few files only.
run=(buildah --root "$new/root" --runroot "$new/run" --storage-driver vfs)
for image in "${images[@]}"; do
    name=localhost/$image:$version
    "${run[@]}" build --quiet --isolation chroot --timestamp "${moment:-0}" "${labels[@]}" \
        --build-arg "VERSION=$version" --build-arg "PROFILE=$profile" \
        --build-context "programs=$new/programs" --build-context "etcd=$new/etcd" \
        --target "$image" --tag "$name" --file Dockerfile images > /dev/null
    "${run[@]}" push --quiet "$name" "oci-archive:$new/archives/$image-$version.tar:$name" > /dev/null
    images/sbom.sh "$image" "$profile" "$etcd" > "$new/archives/$image-$version.cdx.json"
done
if [ "$(whole)" != "$of" ]; then
    echo "the inputs of the images changed during the build: build again" >&2
    exit 1
fi
echo "$of" > "$new/archives/made-of"
mv "$new/archives" "$made"
finish
