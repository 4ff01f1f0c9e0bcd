"""Several hosts on this machine, made of Linux namespaces.

    with hosts(directory, 4, rate="1gbit") as cluster:
        done = cluster.run(2, sys.executable, "script.py", timeout=60)
        assert done.returncode == 0, done.stdout

They are named h1, h2, ...  Each has a network interface, a host name, processes,
/dev/shm and a directory for temporary files of its own; other files are those of this
machine.  A bridge joins them, so ranks on different hosts exchange messages by TCP, at
``rate`` in each direction of each link.  Root is needed (`obstacle` says what is
missing).  All of it is in namespaces that end with the ``with`` block, or with this
process; several clusters can run at a time.

To try something by hand, on 4 hosts with 2 ranks each:

    python -m tests.cluster.hosts -n 4 -r 2 --rate 1gbit -- hpcaccum bench allreduce
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.programs import run_program

PACKAGES = "iproute2 util-linux"
HOSTS_SCRIPT = Path(__file__).with_name("hosts.sh")
SSH_SCRIPT = Path(__file__).with_name("ssh.sh")
OPEN_MPI = Path(__file__).parents[2] / ".ci" / "env.openmpi"

ISOLATED = ("--net", "--uts", "--ipc", "--mount", "--pid")
# All that hosts.sh makes of what not every kernel has.
PROBE = (
    "ip link add bridge type bridge && ip link add here type veth peer there"
    " && tc qdisc add dev here root tbf rate 1gbit burst 256kb latency 50ms"
)
# What a launcher around this may have left: mpiexec would take its hosts.
FOREIGN = ("SLURM_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")


class Cluster:
    """Running hosts: start MPI jobs on them, and count the bytes between them.

    Attributes:
        names: Of the hosts that have ranks: h1, h2, ...
        enter: What to write before a command to run it on h0, which starts the jobs.
    """

    def __init__(self, directory: Path, count: int, init: int):
        self.names = [f"h{number}" for number in range(1, count + 1)]
        self.enter = ["nsenter", f"--target={init}", *ISOLATED]
        self._init, self._directory = init, directory  # process 1 of h0
        self._own = {
            "HOSTS_DIRECTORY": str(directory),  # for ssh.sh
            "TMPDIR": str(directory / "tmp"),
            "OMPI_MCA_btl_tcp_if_include": "eth0",
        }

    def run(
        self,
        ranks: int,
        *program: str | Path,
        timeout: float,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program with that many ranks on each host; they are placed in blocks.

        stdout of the result has the errors too, in the order they came. A program that
        takes longer than ``timeout`` seconds is ended and fails the test.
        """
        command = self.command(ranks, *program, cwd=cwd)
        return run_program(command, timeout=timeout, env=self.environment(env))

    def command(
        self,
        ranks: int,
        *program: str | Path,
        cwd: Path | None = None,
        options: Sequence[str] = (),
    ) -> list[str]:
        """The command that `run` starts, which needs `environment`.

        ``options`` are for mpiexec.
        """
        mpiexec = _mpiexec()
        hosts = ",".join(f"{name}:{ranks}" for name in self.names)
        version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True)
        if "HYDRA" in version.stdout:
            place = ["-launcher=ssh", f"-launcher-exec={SSH_SCRIPT}", "-hosts", hosts]
        else:
            agent = ["--prtemca", "plm_ssh_agent", str(SSH_SCRIPT)]
            place = [*agent, "--map-by", "slot:OVERSUBSCRIBE", "--host", hosts]
        chdir = f"--chdir={cwd or Path.cwd()}"
        size = str(ranks * len(self.names))
        job = [mpiexec, *options, *place, "-n", size, *map(str, program)]
        return [*self.enter, "env", chdir, *job]

    def environment(self, env: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of `command`: what is needed here, added to ``env``."""
        pattern = r"^export (\w+)=(.*)$"
        defaults = dict(re.findall(pattern, OPEN_MPI.read_text(), re.MULTILINE))
        defaults["OMP_NUM_THREADS"] = "1"
        kept = {k: v for k, v in env.items() if not k.startswith(FOREIGN)}
        return defaults | kept | self._own

    def cut(self, name: str) -> None:
        """Take the link of a host down: what is sent to it or by it is lost."""
        self._on_h0("ip", "link", "set", name, "down")

    def connect(self, name: str) -> None:
        """Take the link of a host up again."""
        self._on_h0("ip", "link", "set", name, "up")

    def power_off(self, name: str) -> None:
        """End a host with all of its processes at once; it does not return."""
        init = (self._directory / f"{name}.pid").read_text().strip()
        self._on_h0("kill", "-KILL", init)

    def running(self, word: str) -> list[str]:
        """The commands of all hosts that have this word as an argument."""
        found = self._on_h0("ps", "-A", "-o", "args=")
        lines = [line for line in found.splitlines() if "mpiexec" not in line]
        return [line for line in lines if word in line.split()]

    def _on_h0(self, *command: str) -> str:
        entered = [*self.enter, *command]
        done = subprocess.run(entered, check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes that each host has sent to and received from others, by its name.

        Ranks read the same in /sys/class/net/eth0/statistics of their host.
        """
        found = {}
        # Of the bridge's ends of the links: what a host sends, the bridge receives.
        lines = Path(f"/proc/{self._init}/net/dev").read_text().splitlines()
        for name, _, counters in (line.strip().partition(":") for line in lines):
            if name in self.names:
                numbers = [int(number) for number in counters.split()]
                found[name] = numbers[0], numbers[8]
        return found


def obstacle() -> str | None:
    """Say why no hosts can be made here, or return None."""
    if sys.platform != "linux":
        return "need Linux namespaces"
    if os.geteuid() != 0:
        return "need root, to make namespaces"
    missing = [name for name in ("ip", "tc", "unshare") if not shutil.which(name)]
    if missing:
        return f"need {', '.join(missing)}: apt-get install {PACKAGES}"
    probe = ["unshare", *ISOLATED, "--mount-proc", "--fork", "sh", "-c", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode:
        return f"need the right to make namespaces and links: {done.stderr.strip()}"
    return None


@contextlib.contextmanager
def hosts(directory: Path, count: int, *, rate: str = "") -> Iterator[Cluster]:
    """Run hosts; ``directory`` must exist, be empty, and have a path without spaces.

    Args:
        directory: For files that the hosts need; it is not removed.
        count: Number of hosts, at most 250.
        rate: Limit of each link, as tc writes it ("1gbit"); no limit by default.

    Raises:
        RuntimeError: If they do not start within 30 s; with their errors.
    """
    (directory / "tmp").mkdir()
    script = [str(HOSTS_SCRIPT), str(directory), str(count), rate]
    with (directory / "log").open("w") as log:
        namespaces = subprocess.Popen(
            ["unshare", *ISOLATED, "--mount-proc", "--fork", "--kill-child", *script],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the tests, which then stop this
        )
    try:
        _wait_until_ready(directory, namespaces)
        yield Cluster(directory, count, _child(namespaces.pid))
    finally:
        stop(namespaces)


def _wait_until_ready(directory: Path, namespaces: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not (directory / "ready").exists():
        if namespaces.poll() is not None or time.monotonic() > deadline:
            log = (directory / "log").read_text()
            raise RuntimeError(f"the hosts did not start\n{log}")
        time.sleep(0.02)


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def stop(namespaces: subprocess.Popen[bytes]) -> None:
    """End a process that ends when its input does, and all that it has started."""
    assert namespaces.stdin is not None
    namespaces.stdin.close()
    try:
        namespaces.wait(timeout=10)
    except subprocess.TimeoutExpired:
        namespaces.kill()  # --kill-child: and all the others with it
        namespaces.wait()


def _mpiexec() -> str:
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    found = shutil.which("mpiexec", path=path)
    if found is None:
        raise RuntimeError(f"no mpiexec in {path}")
    return found


def main() -> int:
    """Run the command given as arguments on hosts."""
    parser = argparse.ArgumentParser(description="Run an MPI program on several hosts.")
    parser.add_argument("-n", type=int, default=2, help="number of hosts")
    parser.add_argument("-r", type=int, default=1, help="ranks on each host")
    parser.add_argument("--rate", default="", help="of each link, such as 1gbit")
    parser.add_argument("command", nargs="+", help="after --, with its arguments")
    given = parser.parse_args()
    if reason := obstacle():
        sys.exit(f"hosts.py: hosts {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes the directory
    with (
        tempfile.TemporaryDirectory(prefix="hosts-") as name,
        hosts(Path(name), given.n, rate=given.rate) as cluster,
    ):
        command = cluster.command(given.r, *given.command)
        env = cluster.environment()
        status = subprocess.run(command, env=env, stdin=subprocess.DEVNULL).returncode
        for host, (sent, received) in cluster.traffic().items():
            line = f"{host}: {sent:,} bytes sent, {received:,} received"
            print(line, file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
