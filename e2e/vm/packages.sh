#!/usr/bin/env bash
# Downloads QEMU, a kernel and busybox as packages of the distribution (Debian or a relative, 91 MB) and unpacks them to
# $REPRISE_CACHE/vm. Installs nothing and needs no root. Does nothing if they are there already.
#
# Prints the folder.
set -euo pipefail
cache=${REPRISE_CACHE:-$HOME/.cache/reprise}/vm
folder=$cache/packages
if [ -e "$folder/complete" ]; then
    echo "$folder"
    exit 0
fi
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || {
    echo "the VM lab takes QEMU and a kernel from Debian packages: run it on Debian or Ubuntu" >&2
    exit 1
}
mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9
[ ! -e "$folder/complete" ] || { echo "$folder"; exit 0; }
rm -rf "$folder" "$cache/apt"
mkdir -p "$folder" "$cache/apt/lists/partial" "$cache/apt/archives/partial"
# An empty list of installed packages: apt then also names the dependencies that this machine has. Hooks and logs of the
# system's configuration are switched off, as they write outside the folder.
: > "$cache/apt/status"
cat > "$cache/apt/apt.conf" << CONF
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$cache/apt";
Dir::State::status "$cache/apt/status";
Dir::Cache "$cache/apt";
Dir::Log "$cache/apt";
CONF
export APT_CONFIG=$cache/apt/apt.conf TMPDIR=$cache/apt
cd "$cache/apt/archives"
{
    apt-get -q update
    # The name of the kernel's package changes with its updates.
    kernel=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -1)
    mapfile -t others < <(apt-get -s --no-install-recommends install qemu-system-x86 busybox-static | sed -n 's/^Inst \([^ ]*\) .*/\1/p')
    [ -n "$kernel" ] && [ ${#others[@]} -gt 0 ] || { echo "apt does not know linux-image-amd64, qemu-system-x86 or busybox-static" >&2; exit 1; }
    apt-get -q download "$kernel" "${others[@]}"
} > "$cache/packages.log" 2>&1 || {
    tail -5 "$cache/packages.log" >&2
    echo "the packages of the VM lab cannot be downloaded: check the machine's package sources ($cache/packages.log)" >&2
    exit 1
}
for package in *.deb; do
    case $package in
    # Of the kernel only the modules that the lab loads: all of them have 400 MB.
    linux-image-*)
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$folder" --wildcards --no-wildcards-match-slash \
            './boot/vmlinuz-*' './*lib/modules/*/modules.builtin' './*lib/modules/*/kernel/drivers/nvme' \
            './*lib/modules/*/kernel/drivers/vfio' './*lib/modules/*/kernel/block' './*lib/modules/*/kernel/virt' './*lib/modules/*/kernel/lib' \
            './*lib/modules/*/kernel/crypto' './*lib/modules/*/kernel/arch/x86/crypto'
        ;;
    *) dpkg-deb -x "$package" "$folder" ;;
    esac
done
# Later kernels have compressed modules.
find "$folder" -name '*.ko.xz' -exec xz --decompress {} +
rm -rf "$cache/apt"
touch "$folder/complete"
echo "$folder"
