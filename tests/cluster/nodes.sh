#!/bin/bash
# nodes.sh DIR NODE...
# The daemons of the cluster whose slurm.conf lies in DIR/etc.  slurm.py starts this as
# process 1 of a pid namespace: when it ends, the kernel ends everything else in there,
# jobs included.  It ends when its standard input does, so when the tests end, be it
# by SIGKILL.
set -eu
dir=$1
shift

# Where killed ranks leave their shared memory behind.
mount -t tmpfs -o mode=1777 tmpfs /dev/shm

# --force: munged refuses a socket below a directory that is not open to all.
munged --force \
    --key-file="$dir/munge/key" --socket="$dir/munge/socket" --seed-file="$dir/munge/seed" \
    --pid-file="$dir/munge/pid" --log-file="$dir/log/munged"

slurmctld -i

# Open MPI needs hostname = node name, and MPICH's hydra an address for it.
for node; do
    mkdir -p "$dir/spool/$node" "$dir/tmp/$node"
    # shellcheck disable=SC2016  # $1 and $2 are those of the inner bash
    unshare --uts --mount bash -c '
        mount --bind "$1/etc/hosts" /etc/hosts
        hostname "$2"
        exec slurmd -N "$2"' _ "$dir" "$node"
done

read -r _ || true
