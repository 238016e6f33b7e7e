#!/usr/bin/env bash
# Checks all crates of Cargo.lock with cargo-deny (deny.toml): licences, sources, bans, and known vulnerabilities.
#
# The database of advisories is fetched if the network allows it. Otherwise the copy of an earlier run is used, which
# Cargo's folder keeps. ADVISORY_DB=FOLDER takes it from a clone of https://github.com/RustSec/advisory-db instead.
#
# Exit status: 0: all is well; 1: a check has failed; 2: cargo-deny cannot be installed; 3: advisories were not checked,
# or only with a database older than 90 days.
set -euo pipefail
version=0.20.2
days_max=90
cd "$(dirname "$0")/.."
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
# Where cargo-deny keeps the database: the name has a hash of its address.
database=${CARGO_HOME:-$HOME/.cargo}/advisory-dbs/advisory-db-3157b0e258782691

export PATH=$PATH:$cache/tools/bin
if ! command -v cargo-deny > /dev/null; then
    cargo install --locked --quiet "cargo-deny@$version" --root "$cache/tools" >&2 || {
        echo "cargo-deny cannot be installed: run 'cargo install --locked cargo-deny@$version' with a network, and" \
            "repeat 'make deny'; nothing was checked" >&2
        exit 2
    }
fi

cargo deny --locked --offline --log-level error check bans licenses sources || exit 1

if [ -n "${ADVISORY_DB:-}" ]; then
    commit=$(git -C "$ADVISORY_DB" rev-parse HEAD) ||
        { echo "ADVISORY_DB=$ADVISORY_DB is not a clone of RustSec's advisory-db" >&2; exit 3; }
    rm -rf "$database"
    mkdir -p "$(dirname "$database")"
    git clone --quiet "$ADVISORY_DB" "$database"
    git -C "$database" checkout --quiet --detach "$commit"
elif ! cargo deny --locked fetch db > /dev/null 2>&1; then
    if [ ! -d "$database" ]; then
        echo "ADVISORIES WERE NOT CHECKED: there is no network and no cached database; run 'make deny' once with a" \
            "network, or set ADVISORY_DB to a clone of https://github.com/RustSec/advisory-db" >&2
        exit 3
    fi
    echo "no network: the cached database of advisories is used" >&2
fi
day=$(git -C "$database" log -1 --format=%cs)
age=$((($(date +%s) - $(git -C "$database" log -1 --format=%ct)) / 86400))
cargo deny --locked --offline --log-level error check advisories || {
    echo "advisories were checked with the database of $day" >&2
    exit 1
}
if [ "$age" -gt "$days_max" ]; then
    echo "ADVISORIES WERE CHECKED ONLY UP TO $day, $age days ago: repeat 'make deny' with a network, or set ADVISORY_DB" \
        "to a newer clone" >&2
    exit 3
fi
echo "advisories were checked with the database of $day"
