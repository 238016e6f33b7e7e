#!/usr/bin/env bash
# Installs another cache for vLLM into a separate environment in the cache folder: peer-venv.sh mooncake | lmcache. The
# environment also uses the packages of vLLM's environment, so it is small. Prints the path of its python.
# Exit status 3: it cannot be installed here; the reason is the last line of standard error.
set -euo pipefail
cd "$(dirname "$0")"
requirements=$1.txt
vllm=$(../vllm-venv.sh)
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
# Each version of the list and of vLLM has its own environment.
home=$cache/bench/$1-$(cat "$requirements" ../tests/vllm/requirements.txt | sha256sum | cut -c1-12)
refuse() { echo "$1 cannot be installed: $2" >&2; exit 3; }
if [ "$1" = mooncake ] && ! ldconfig -p | grep 'libibverbs\.so\.1 ' > /dev/null; then
    # Mooncake's library needs it even without such a card; it is a system package, outside the environment.
    apt-get install -y --no-install-recommends libibverbs1 >&2 || refuse "$1" "the Debian package libibverbs1 is missing"
fi
if [ ! -e "$home/complete" ]; then
    mkdir -p "$cache/bench"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 2000 ] || refuse "$1" "$cache has $free MiB free, 2000 are needed during the installation"
    rm -rf "$home"
    "$vllm" -m venv "$home"
    site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    site "$vllm" > "$(site "$home/bin/python")/vllm.pth"
    # Common packages keep the versions of vLLM's environment, regardless of the peer's requirements.
    "$home/bin/python" -m pip -q install --no-deps --no-cache-dir -r "$requirements" >&2 || refuse "$1" "pip failed"
    case $1 in
        mooncake) module=mooncake.store ;;
        lmcache) module=lmcache.integration.vllm.vllm_multi_process_adapter ;;
    esac
    "$home/bin/python" -P -c "import $module" > /dev/null || refuse "$1" "it is installed but does not start"
    touch "$home/complete"
fi
echo "$home/bin/python"
