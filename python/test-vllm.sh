#!/usr/bin/env bash
# Builds the wheel and runs the tests with vLLM's CPU engine, and the tests of the adapters for GPU engines with these
# engines' own Python classes, using the debug binaries: test-vllm.sh [vllm|tier|sglang [pytest arguments]]. Skips, with
# a message, what cannot be installed here (exit status 3 of its installation script); every other error fails the run.
set -euo pipefail
cd "$(dirname "$0")"
skip() { printf '\n%s\n\n' "######## SKIPPED: $1 (the reason is above) ########" >&2; }
python=$(./vllm-venv.sh) || {
    [ $? -eq 3 ] || exit 1
    skip "the tests with a real vLLM engine, and of the adapters for engines on GPUs"
    exit 0
}
wheel=$(./wheel.sh)
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
# Not in the environment, which others may use concurrently with another wheel.
"$python" -m pip -q install --no-deps --no-compile --target "$package" "$wheel"
tests=$PWD/tests

# run SUITE SOURCES [pytest arguments]: the sources of an engine precede its packages in the environment.
run() {
    local suite=$tests/$1 sources=$2
    shift 2
    (cd "$suite" && PYTHONPATH=${sources:+$sources:}$package:$suite:$tests "$python" -P -m pytest -p no:cacheprovider \
        -c /dev/null -o tmp_path_retention_count=1 -o tmp_path_retention_policy=failed \
        --rootdir "$suite" -ra --durations=10 "${@:-.}")
}

# sources ENGINE TESTS: sets `found` to the folder of an engine's sources; skips the tests if they cannot be fetched.
sources() {
    found=$(./engine-sources.sh "$1") && return
    [ $? -eq 3 ] || exit 1
    skip "$2"
    return 1
}

# imports SUITE: prints the folder of packages that vLLM's environment does not have (tests/SUITE/requirements.txt).
imports() {
    local list=$tests/$1/requirements.txt cache=${REPRISE_CACHE:-$HOME/.cache/reprise} home part
    home=$cache/$1-imports-$({ cat "$list" && "$python" -V; } | sha256sum | cut -c1-12)
    if [ ! -e "$home" ]; then
        part=$(mktemp -d "$cache/$1-imports.XXXXXX")
        "$python" -m pip -q install --no-deps --no-compile --target "$part" -r "$list" >&2 || exit 1
        chmod 755 "$part"
        # Another run may have installed them concurrently.
        mv -T "$part" "$home" 2> /dev/null || { rm -rf "$part" && [ -e "$home" ]; } || exit 1
    fi
    printf '%s\n' "$home"
}

suites=${1:-vllm tier sglang}
[ $# -eq 0 ] || shift
for suite in $suites; do
    case $suite in
        vllm) run vllm "" "$@" ;;
        tier) if sources vllm "the tests of vLLM's secondary tier"; then run tier "$found" "$@"; fi ;;
        sglang) if sources sglang "the tests of SGLang's storage"; then
            imported=$(imports sglang)
            run sglang "$found:$imported" "$@"
        fi ;;
        *) echo "unknown suite $suite: expected vllm, tier or sglang" >&2; exit 2 ;;
    esac
done
