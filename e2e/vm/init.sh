#!/bin/busybox sh
# First program of the virtual machine: mounts, kernel modules, the tests, power-off. The line END is the last one of the
# console: without it, the machine has died.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
# Messages of the kernel would break up the lines of the tests.
echo 1 > /proc/sys/kernel/printk
while read -r module; do
    insmod "/modules/$module.ko" || echo "module $module was not loaded"
done < /modules/order
ulimit -l 8192
. /tests.sh
echo "END after $(cut -d ' ' -f 1 /proc/uptime) s"
# The message of the power-off would break up the line.
usleep 200000
echo o > /proc/sysrq-trigger
sleep 60
