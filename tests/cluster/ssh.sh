#!/bin/bash
# ssh.sh [OPTION...] HOST COMMAND...
# What mpiexec calls on h0 instead of ssh: run a command on a host of hosts.sh.  Unlike
# ssh it keeps the environment and the current directory.
set -eu
while [[ $1 == -* ]]; do shift; done
read -r init <"$HOSTS_DIRECTORY/$1.pid"
shift
exec nsenter --target "$init" --mount --uts --ipc --net --pid \
    env --chdir="$PWD" sh -c "$*"
