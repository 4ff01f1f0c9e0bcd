"""A throw-away SLURM cluster on this machine.

    with cluster(directory) as slurm:
        job = slurm.submit("train.sbatch", cwd=directory)
        assert slurm.wait(job, timeout=30) == ["COMPLETED"]

It has two nodes, named n1 and n2, of eight pretended cores and four pretended GPUs
each.  Jobs of the partition ``urgent`` take the place of others.  Root, Debian's SLURM
and namespaces are needed (`obstacle` says what is missing), but no systemd, cgroups or
accounting.  Everything it writes lies below ``directory``, its ports listen on
127.0.0.1, and its processes live in a pid namespace that ends with the ``with`` block,
or with this process.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.cluster.hosts import stop

NODES = ("n1", "n2")
PACKAGES = "slurm-wlm munge libpmix-dev"
NODES_SCRIPT = Path(__file__).with_name("nodes.sh")

# Without this slurmd looks for cgroups, and ends where none are mounted.
# Files that stand for devices: they are counted and given to jobs.
GRES_CONF = "Name=gpu File={directory}/gpu/[0-3]\n"
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"

SLURM_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
# Of its own for each node: the pmix plugins would find each other's files.
TmpFS={directory}/tmp/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld
SlurmdLogFile={directory}/log/slurmd.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
# Seconds between SIGTERM and SIGKILL; by default 30.
KillWait=5
MpiDefault=none
# The defaults let a job wait for many seconds.
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# More cores than the machine has.
SlurmdParameters=config_overrides
PartitionName=debug Nodes=ALL Default=YES State=UP PriorityTier=1
# Its jobs take the place of others.
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
"""
NODE_LINE = (
    "NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=8 "
    "Gres=gpu:4\n"
)

_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class Cluster:
    """A running cluster: submit jobs and wait for them."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.env = {"SLURM_CONF": str(directory / "etc/slurm.conf")}

    def call(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        timeout: float = 20,
    ) -> str:
        """Run a client program such as ``sinfo``; return what it prints."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**env, **self.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, command))} ended with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}"
            )
        return done.stdout

    def submit(
        self, *arguments: str | Path, cwd: Path, env: Mapping[str, str] = os.environ
    ) -> str:
        """Run ``sbatch`` with these arguments; return the job's number."""
        return self.call("sbatch", "--parsable", *arguments, cwd=cwd, env=env).strip()

    def wait(self, job: str, *, timeout: float) -> list[str]:
        """Wait for a job (all tasks, if it is an array); return how each ended.

        Raises:
            TimeoutError: If it has not ended in time.  It goes on.
        """
        # `sbatch --wait` looks after 2 s and then every 10 s.
        deadline = time.monotonic() + timeout
        while not (states := self.states(job)) or not _ENDED.issuperset(states):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited {timeout:g} s for job {job}, it is {states}"
                )
            time.sleep(0.1)
        return states

    def find(self, pattern: str) -> list[Path]:
        """Return files of the daemons."""
        return list(self.directory.glob(pattern))

    def states(self, job: str) -> list[str]:
        """State of a job, one for each task of an array, such as RUNNING."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return [word[9:] for word in words if word.startswith("JobState=")]


def obstacle() -> str | None:
    """Say why no cluster can be started here, or return None."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
    missing = [name for name in programs if not shutil.which(name, path=_path())]
    if sys.platform != "linux" or not _is_debian():
        # Others build slurmd without --enable-multiple-slurmd.
        return "needs Debian's slurmd, of which several can run on one machine"
    if os.geteuid() != 0:
        return "needs root, as slurmd does"
    if missing:
        return f"needs {', '.join(missing)}: apt-get install {PACKAGES}"
    if not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        return "needs libpmix.so for srun --mpi=pmix: apt-get install libpmix-dev"
    probe = ["unshare", "--uts", "--pid", "--mount", "--fork", "true"]
    if subprocess.run(probe, capture_output=True).returncode:
        return "needs the right to make namespaces (CAP_SYS_ADMIN)"
    return None


def _is_debian() -> bool:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return False
    return "debian" in (release["ID"], *release.get("ID_LIKE", "").split())


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Run a cluster in an existing, empty directory.

    Raises:
        RuntimeError: If it does not start within 30 s; with the ends of its logs.
    """
    _configure(directory)
    slurm = Cluster(directory)
    # Daemons hand their environment on to the jobs, so they get a plain one.
    env = {"PATH": _path(), "HOME": "/root", "LANG": "C.UTF-8", **slurm.env}
    script = [str(NODES_SCRIPT), str(directory), *NODES]
    with (directory / "log/start").open("w") as log:
        namespace = subprocess.Popen(
            ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child", *script],
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests, which then stop this
        )
    try:
        _wait_until_idle(slurm, namespace)
        yield slurm
    finally:
        stop(namespace)


def _configure(directory: Path) -> None:
    for name in ("etc", "gpu", "log", "munge", "spool", "state", "tmp"):
        (directory / name).mkdir()
    key = directory / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    port, *node_ports = _free_ports(1 + len(NODES))
    conf = SLURM_CONF.format(
        host=socket.gethostname(), port=port, directory=directory
    ) + "".join(
        NODE_LINE.format(name=name, port=port)
        for name, port in zip(NODES, node_ports, strict=True)
    )
    hosts = Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n"
    (directory / "etc/slurm.conf").write_text(conf)
    (directory / "etc/cgroup.conf").write_text(CGROUP_CONF)
    (directory / "etc/gres.conf").write_text(GRES_CONF.format(directory=directory))
    for number in range(4):
        (directory / "gpu" / str(number)).touch()
    (directory / "etc/hosts").write_text(hosts)


def _free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to outgoing connections."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return list(ports)


def _wait_until_idle(slurm: Cluster, namespace: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    idle: list[str] = []
    while len(idle) < len(NODES):
        if namespace.poll() is not None or time.monotonic() > deadline:
            logs = sorted((slurm.directory / "log").iterdir())
            tails = [f"{log.name}: {log.read_text()[-1000:]}" for log in logs]
            raise RuntimeError("the cluster did not start\n" + "\n".join(tails))
        time.sleep(0.1)
        # It fails as long as slurmctld does not listen.
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            idle = slurm.call("sinfo", "-hN", "-tidle", "-o%N", timeout=5).split()
