#!/usr/bin/env bash
# What nodes of a test cluster, and tests of disks, take from the distribution: installs what is missing where that is possible (Debian, root), and
# says what is missing where it is not. A machine that cannot run the cluster is told so, and why.
set -euo pipefail

# Of each package, a file that it brings: a command, or a network plugin.
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
    echo "a cluster of Kubernetes with nodes needs root: they mount file systems and make control groups and networks" >&2
    exit 1
fi
mapfile -t wanted < <(missing)
[ ${#wanted[@]} -gt 0 ] || exit 0
if command -v apt-get > /dev/null; then
    echo "installing ${wanted[*]}" >&2
    install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${wanted[@]}" >&2; }
    # The lists of packages may be old, or none.
    install || { apt-get update >&2 && install; } || true
fi
mapfile -t wanted < <(missing)
[ ${#wanted[@]} -eq 0 ] || { echo "a cluster of Kubernetes needs, and this machine lacks: ${wanted[*]}" >&2; exit 1; }
