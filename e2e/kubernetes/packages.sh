#!/usr/bin/env bash
# Installs the packages that nodes of a test cluster and tests of disks need (Debian, as root). Elsewhere it
# lists the missing packages. Fails with the reason on a machine that cannot run the cluster.
set -euo pipefail

# For each package, a command or a network plugin that it contains.
packages=(
    containerd=containerd containerd=ctr runc=runc containernetworking-plugins=ptp iptables=iptables nftables=nft
    conntrack=conntrack socat=socat iproute2=ip util-linux=unshare util-linux=nsenter util-linux=fsfreeze mount=mount
    e2fsprogs=mkfs.ext4
)

has() {
    case $1 in
    ptp) [ -x /usr/lib/cni/ptp ] || [ -x /opt/cni/bin/ptp ] ;;
    *) PATH=$PATH:/usr/sbin:/sbin command -v "$1" > /dev/null ;;
    esac
}

missing() {
    for pair in "${packages[@]}"; do
        has "${pair#*=}" || echo "${pair%%=*}"
    done | sort -u
}

if [ "$(id -u)" != 0 ]; then
    echo "a Kubernetes cluster with nodes needs root, to mount file systems and to create control groups and networks" >&2
    exit 1
fi
mapfile -t wanted < <(missing)
[ ${#wanted[@]} -gt 0 ] || exit 0
if command -v apt-get > /dev/null; then
    echo "installing ${wanted[*]}" >&2
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${wanted[@]}" >&2; }
    # The package lists may be outdated or missing.
    install || { apt-get update >&2 && install; } || true
fi
mapfile -t wanted < <(missing)
[ ${#wanted[@]} -eq 0 ] || { echo "packages that a Kubernetes cluster needs are missing, install them: ${wanted[*]}" >&2; exit 1; }
