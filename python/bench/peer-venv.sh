#!/usr/bin/env bash
# Installs another cache for vLLM into an environment of its own in the cache folder: peer-venv.sh mooncake | lmcache. It has vLLM's
# environment behind its own packages, which therefore need little room. Prints the path of its python.
# Exit status 3: it cannot be installed here, and why, in the last line of standard error.
set -euo pipefail
cd "$(dirname "$0")"
requirements=$1.txt
vllm=$(../vllm-venv.sh)
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}
# Another list, or another vLLM, is another environment.
home=$cache/bench/$1-$(cat "$requirements" ../tests/vllm/requirements.txt | sha256sum | cut -c1-12)
refuse() { echo "$1 cannot be installed: $2" >&2; exit 3; }
if [ "$1" = mooncake ] && ! ldconfig -p | grep 'libibverbs\.so\.1 ' > /dev/null; then
    # Its library is linked with it, also where there is no such card. It is the system's, and no environment keeps it.
    apt-get install -y --no-install-recommends libibverbs1 >&2 || refuse "$1" "there is no libibverbs1 (Debian's package)"
fi
if [ ! -e "$home/complete" ]; then
    mkdir -p "$cache/bench"
    free=$(df --output=avail -B1M "$cache" | tail -1)
    [ "$free" -ge 2000 ] || refuse "$1" "$cache has $free MiB left, 2000 are needed meanwhile"
    rm -rf "$home"
    "$vllm" -m venv "$home"
    site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    site "$vllm" > "$(site "$home/bin/python")/vllm.pth"
    # Versions of what both need are those of vLLM's environment, whatever the peer asks for.
    "$home/bin/python" -m pip -q install --no-deps --no-cache-dir -r "$requirements" >&2 || refuse "$1" "pip failed"
    case $1 in
        mooncake) module=mooncake.store ;;
        lmcache) module=lmcache.integration.vllm.vllm_multi_process_adapter ;;
    esac
    "$home/bin/python" -P -c "import $module" > /dev/null || refuse "$1" "it is installed and does not start here"
    touch "$home/complete"
fi
echo "$home/bin/python"
