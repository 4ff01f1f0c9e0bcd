"""A host that is cut off, or without power, during a training on three hosts."""

from __future__ import annotations

import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Cluster, hosts

# Seconds; a job here takes 5 to 15.
WAIT = 60
# Seconds without a message of the heartbeat.
LIMIT = 8
# A training that does not end, and one of some seconds.
TRAIN = "train", "--no-plot", "--batch", "64"
ENDLESS, SHORT = ("--epochs", "1000000"), ("--epochs", "100")


class Job:
    """A training on hosts, two ranks each; what it prints goes to a file."""

    def __init__(
        self, cluster: Cluster, directory: Path, limit: float, *words: str
    ) -> None:
        program = Path(sysconfig.get_path("scripts"), "hpcaccum")
        command = cluster.command(2, program, *TRAIN, *words, cwd=directory)
        env = cluster.environment() | {
            "HPCACCUM_HEARTBEAT": str(limit),
            "HPCACCUM_ON_LOSS": "abort",
        }
        self.output = directory / "output"
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What it has printed, on lines as long as they were."""
        return re.sub(r"\s+", " ", self.output.read_text(errors="replace"))

    def until(self, done: Callable[[], object], what: str) -> None:
        """Wait for something."""
        limit = time.monotonic() + WAIT
        while not done():
            assert time.monotonic() < limit, f"no {what}:\n{self.text}"
            time.sleep(0.05)

    def until_text(self, text: str) -> None:
        """Wait until it has printed a text."""
        self.until(lambda: text in self.text, repr(text))

    def wait(self) -> int:
        """Return its exit status."""
        self.until(lambda: self.process.poll() is not None, "end")
        return self.process.returncode


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "hosts").mkdir()
    with hosts(tmp_path / "hosts", 3) as running:
        yield running


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start a training, and wait until all ranks train."""
    jobs = []

    def begin(*words: str, limit: float = LIMIT) -> Job:
        job = Job(cluster, tmp_path, limit, *words)
        jobs.append(job)
        job.until_text("loss")
        return job

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            # Its launcher may wait for a host that is cut off.
            job.process.send_signal(signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize("strategy", ["cross-shard", "drop-stale"])
def test_a_host_that_is_cut_off_ends_the_job(cluster, start, strategy):
    job = start("--strategy", strategy, *ENDLESS)
    cluster.cut("h3")
    job.until_text("failed, ending the job")
    # Ranks of all hosts, also of the one that no message reaches.
    job.until(lambda: not cluster.running("train"), "end of the ranks")

    place = r"step \d+ of DropStaleGradient|call \d+ of CrossShardOptimizer"
    seen = rf"last seen [\d.]+ s ago: ({place}), (computing or in MPI|waiting in .+?)"
    rank = rf"rank [45] \(process \d+ on h3, {seen}\)"
    reason = rf"{rank} is lost: no heartbeat for {LIMIT} s "
    assert re.search(f"rank 0 of 6 failed, ending the job: {reason}", job.text)


def test_a_host_that_is_connected_again_goes_on(cluster, start):
    job = start("--strategy", "sync-replicas", *SHORT, limit=60)
    cluster.cut("h3")
    time.sleep(2)
    cluster.connect("h3")

    assert job.wait() == 0, job.text
    assert "test accuracy" in job.text
    assert "heartbeat" not in job.text


def test_the_launcher_ends_a_job_when_a_host_has_no_power(cluster, start):
    # Its connections end with it.
    job = start("--strategy", "sync-replicas", *ENDLESS, "--save", "saved")
    cluster.power_off("h3")
    status = job.wait()
    job.until(lambda: not cluster.running("train"), "end of the ranks")

    assert status in (255, 0)  # MPICH, Open MPI
    assert re.search("daemon failed|process manager error|connection", job.text)
    assert not (job.output.parent / "saved" / "status").exists()
