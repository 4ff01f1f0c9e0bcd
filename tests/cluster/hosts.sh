#!/bin/bash
# hosts.sh DIR COUNT [RATE]
# Host h0, which has a bridge, and hosts h1 to hCOUNT, each with a link to it.  hosts.py
# starts this as process 1 of h0.  The namespaces of the others lie within those of h0:
# when this ends, the kernel ends and removes everything.  It ends when its standard
# input does, so when the tests end, be it by SIGKILL.
set -eu
directory=$1 count=$2 rate=${3:-}
ISOLATED=(--net --uts --ipc --mount --pid)

# What each host has of its own, besides its network.
set_up() {
    hostname "$1"
    mount --bind "$directory/etc_hosts" /etc/hosts
    # Process ids repeat, and Open MPI puts them into names of temporary files.
    mount -t tmpfs -o mode=1777 tmpfs "$directory/tmp"
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t sysfs -o ro sysfs /sys # shows the interfaces of this host
    # An IPv6 address is not ready at once.
    if [ -d /proc/sys/net/ipv6 ]; then echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; fi
    # With BBR, the default of some machines, one step in six of a cross-shard optimizer
    # took twice as long at 250 Mbit/s, and none with Reno, which is always allowed.
    echo reno >/proc/sys/net/ipv4/tcp_congestion_control || true
    ip link set lo up
}
export -f set_up
export directory

# Bytes that leave an interface of this host, or by "$@" of another, wait for their turn.
limit_rate() {
    local interface=$1
    shift
    [ -n "$rate" ] || return 0
    "$@" tc qdisc add dev "$interface" root tbf rate "$rate" burst 256kb latency 50ms
}

start_host() {
    local name=h$1 parent started init inside
    # shellcheck disable=SC2016  # $1 is that of the inner bash, which stays to reap orphans
    exec {started}< <(exec </dev/null unshare "${ISOLATED[@]}" --mount-proc --fork --kill-child \
        bash -euc 'set_up "$1"; echo; sleep infinity & wait' _ "$name")
    parent=$!
    read -r _ <&"$started"
    read -rd " " init <"/proc/$parent/task/$parent/children"
    inside=(nsenter --target "$init" --net)
    ip link add "$name" type veth peer name eth0 netns "$init"
    ip link set "$name" master eth0 up
    "${inside[@]}" ip address add "10.0.0.$1/24" dev eth0
    "${inside[@]}" ip link set eth0 up
    limit_rate "$name"
    limit_rate eth0 "${inside[@]}"
    echo "$init" >"$directory/$name.pid" # for ssh.sh
}

echo "127.0.0.1 localhost" >"$directory/etc_hosts"
for ((i = 0; i <= count; i++)); do
    echo "10.0.0.$((i ? i : 254)) h$i" >>"$directory/etc_hosts"
done
set_up h0
ip link add eth0 type bridge
ip address add 10.0.0.254/24 dev eth0
ip link set eth0 up
for ((i = 1; i <= count; i++)); do
    start_host "$i"
done
: >"$directory/ready"
read -r _ || true
