"""The batch scripts of slurm/, submitted to a SLURM that lives as long as this file.

Where none can be started these tests are skipped, unless HPCACCUM_REQUIRE_SLURM=1.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Cluster, cluster, obstacle

from ..common import json_lines
from .conftest import REPOSITORY

pytestmark = pytest.mark.mpi

# Seconds; a job here takes 1 to 15.
WAIT = 300
QUICK = {
    "bench.sbatch": ("--sizes", "4K", "--seconds", "0.2"),
    "gpu.sbatch": ("--epochs", "1", "--no-plot"),
    "train.sbatch": ("--epochs", "1"),
    "mpiexec.sbatch": ("--epochs", "1", "--no-plot"),
    "sweep.sbatch": ("--sizes", "4K", "--seconds", "0.2"),
}
# Scripts that the command writes.
SBATCH = sys.executable, "-m", "hpcaccum", "sbatch"
WRITTEN = {
    "mpiexec.sbatch": (
        "--launcher",
        "mpiexec",
        "--",
        "train",
        "--strategy",
        "sync-replicas",
    ),
    "sweep.sbatch": ("--sweep", "1,2", "--", "bench", "step"),
}
# A training of some seconds, most of them asleep.
LONG = ("--batch", "64", "--epochs", "10", "--every", "5", "--no-plot")
LONG += ("--straggler", "0:30", "--straggler", "1:30")
# What a launcher around these tests may have left in their environment.
FOREIGN = ("SLURM_", "SBATCH_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_")

# Asks to be started again when it gets SIGUSR1, and ends in order then.
PROGRAM = """
import os, pathlib, signal, sys, time
from mpi4py import MPI

def stop(*_):
    if MPI.COMM_WORLD.rank == 0:
        pathlib.Path(os.environ["REQUEUE_FILE"]).touch()
    MPI.COMM_WORLD.Barrier()
    sys.exit(75)

signal.signal(signal.SIGUSR1, stop)
print("started with", sys.argv[1:], flush=True)
time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else 60)
"""

# Dies after each checkpoint. The words are for `hpcaccum run`.
LOSES = """
import os, pathlib, signal
import hpcaccum as hpc

print("started", flush=True)
hpc.checkpoint.save("saved", 1)
pathlib.Path(os.environ["REQUEUE_FILE"]).write_text("restart")
os.kill(os.getpid(), signal.SIGKILL)
"""

# Rank 1 dies. The others wait for it: rank 2 inside MPI, where no limit reaches it.
DIES = """
import os, signal
import hpcaccum as hpc
from mpi4py import MPI

acc = hpc.ConditionalAccumulator("f4", (3,))
if MPI.COMM_WORLD.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif MPI.COMM_WORLD.rank == 2:
    MPI.COMM_WORLD.Barrier()
acc.take_grad(3)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = obstacle()
    if reason and os.environ.get("HPCACCUM_REQUIRE_SLURM") == "1":
        pytest.fail(f"HPCACCUM_REQUIRE_SLURM=1, but a SLURM cluster {reason}")
    if reason:
        pytest.skip(f"a SLURM cluster {reason}")
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def mpi() -> str:
    """What srun calls the way in which this environment's MPI starts."""
    from mpi4py.MPI import get_vendor

    return "pmix" if get_vendor()[0] == "Open MPI" else "pmi2"


@pytest.fixture(scope="module")
def environment(mpi_environment: dict[str, str]) -> dict[str, str]:
    """The environment of a user's shell."""
    clean = {k: v for k, v in mpi_environment.items() if not k.startswith(FOREIGN)}
    bin_directory = str(Path(sys.executable).parent)
    return clean | {
        "PATH": os.pathsep.join([bin_directory, os.environ["PATH"]]),
        "PYTHONPATH": str(REPOSITORY),
    }


class Submit:
    """Submit scripts of slurm/ from a directory, and follow their jobs.

    They train with ``data``: importing scikit-learn takes seconds.
    """

    def __init__(
        self, slurm: Cluster, env: dict[str, str], directory: Path, data: Path
    ):
        self.slurm = slurm
        self.env = env
        self.directory = directory
        self.data = data

    def __call__(self, script: str, *options: str, **env: str) -> tuple[str, list[str]]:
        """Return the number of the job and how it, or each task of it, ended."""
        job = self.start(script, *options, words=QUICK[script], **env)
        return job, self.wait(job)

    def start(
        self, script: str, *options: str, words: tuple[str, ...], **env: str
    ) -> str:
        """Submit a script with words for its program; return the number of the job."""
        if "--epochs" in words:
            words = *words, "--data", str(self.data)
        path = REPOSITORY / "slurm" / script
        if script in WRITTEN:
            path = self.slurm.directory / script
            path.write_text(self.slurm.call(*SBATCH, *WRITTEN[script], env=self.env))
        return self.slurm.submit(
            *options, path, *words, cwd=self.directory, env=self.env | env
        )

    def wait(self, job: str) -> list[str]:
        """Return how the job, or each task of it, ended."""
        try:
            return self.slurm.wait(job, timeout=WAIT)
        except TimeoutError as error:
            self.slurm.call("scancel", job)
            pytest.fail(f"{error}\n{self.outputs()}")

    def until(self, job: str, text: str) -> str:
        """Wait until the job has written a text; return all that it has written."""
        name = f"*-{job}.out"
        self.follow(job, lambda: text in self.outputs(name), f"{text!r} from")
        return self.outputs(name)

    def saved(self, job: str) -> Path:
        """Wait until the job has written a checkpoint; return their directory."""
        saved = self.directory / f"hpcaccum-train-{job}.saved"
        self.follow(job, lambda: any(saved.glob("*.safetensors")), "checkpoint of")
        return saved

    def follow(self, job: str, done: Callable[[], bool], what: str) -> None:
        """Wait for something of a job, which must not fail meanwhile."""
        limit = time.monotonic() + WAIT
        while not done():
            if time.monotonic() > limit or "FAILED" in self.slurm.states(job):
                pytest.fail(f"no {what} job {job}:\n{self.history(job)}")
            time.sleep(0.1)

    def is_queued(self, job: str) -> bool:
        # Daemons of the script and of its steps end later.
        left = f"spool/*/job{int(job):05}", f"spool/*/*_{job}.*"
        ended = not any(self.slurm.find(each) for each in left)
        return ended and "PENDING" in self.slurm.states(job)

    def again(self, job: str) -> None:
        """Wait until the job is queued again; let it start in 2 s, not in 2 min."""
        self.follow(job, lambda: self.is_queued(job), "second start of")
        # In the second of its end, a node would refuse it as a job that was killed.
        start = "StartTime=now+2seconds"
        self.slurm.call("scontrol", "update", f"jobid={job}", start)

    def history(self, job: str) -> str:
        """What a job has written, and what SLURM says of it."""
        about = self.slurm.call("scontrol", "show", "job", job)
        logs = [path.read_text()[-2000:] for path in self.slurm.find("log/slurm*")]
        return "\n".join([self.outputs(f"*-{job}.out"), about, *logs])

    def outputs(self, names: str = "*.out") -> str:
        """What jobs of this test have written."""
        files = sorted(self.directory.glob(names))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in files)

    def log(self, name: str) -> tuple[dict, dict]:
        """The first and the last line of a log, or of what was measured."""
        lines = json_lines(self.directory / name)
        return lines[0], lines[-1]


@pytest.fixture
def submit(
    slurm: Cluster, environment: dict[str, str], tmp_path: Path, digits: Path
) -> Submit:
    return Submit(slurm, environment, tmp_path, digits)


@pytest.mark.parametrize("script", ["train.sbatch", "mpiexec.sbatch"])
def test_two_nodes(submit: Submit, script):
    options = "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2"
    job, states = submit(script, *options[: 2 + (script == "train.sbatch")])

    assert states == ["COMPLETED"], submit.outputs()
    start, result = submit.log(f"hpcaccum-train-{job}.jsonl")
    assert start["hosts"] == {"n1": 2, "n2": 2}
    assert len(result["accepted"]) == 4
    assert "test accuracy" in submit.outputs()
    if script == "train.sbatch":
        names = {path.name for path in submit.directory.iterdir()}
        ends = ".out", ".jsonl", ".png", ".saved"
        assert names == {f"hpcaccum-train-{job}{end}" for end in ends}
        assert start["settings"]["OMP_NUM_THREADS"] == "2"


def test_gpus(submit: Submit, simulator: str):
    path = os.pathsep.join([simulator, str(REPOSITORY)])
    options = "--ntasks-per-node=2", "--cpus-per-task=1"
    job, states = submit("gpu.sbatch", *options, PYTHONPATH=path)

    assert states == ["COMPLETED"], submit.outputs()
    assert submit.log(f"hpcaccum-train-{job}.jsonl")[0]["device"]


def test_ranks_that_do_not_find_each_other_are_an_error(submit: Submit, mpi: str):
    _, states = submit("train.sbatch", "--ntasks-per-node=2", SLURM_MPI_TYPE="none")

    assert states == ["FAILED"], submit.outputs()
    assert f"srun --mpi={mpi}" in submit.outputs()
    assert not list(submit.directory.glob("*.jsonl"))


def check_continued(submit: Submit, job: str) -> None:
    """Start a job that is queued again; it continues and completes the training."""
    submit.again(job)
    states = submit.wait(job)
    shown = submit.outputs()

    assert states == ["COMPLETED"], submit.history(job)
    assert re.search(r"update \d+, resumed at [1-9]", shown), shown
    assert not list(submit.directory.glob("*.requeue"))
    # Each start has a log of its own.
    assert submit.log(f"hpcaccum-train-{job}.1.jsonl")[1]["resumed_at"] > 0


# SLURM sends the signal of --signal to the script.
@pytest.mark.parametrize(
    ("script", "who"),
    [
        ("train.sbatch", []),
        ("mpiexec.sbatch", ["--batch"]),
    ],
)
def test_a_signal_stops_the_ranks_and_queues_the_job_again(submit, script, who):
    job = submit.start(script, "--nodes=2", "--ntasks-per-node=2", words=LONG)
    submit.saved(job)
    submit.slurm.call("scancel", *who, "--signal=USR1", job)
    shown = submit.until(job, "the job is queued again")

    assert "asked to stop: training ends here" in shown
    check_continued(submit, job)


def test_a_job_of_higher_priority_takes_its_place(submit: Submit):
    job = submit.start(
        "train.sbatch", "--nodelist=n2", "--ntasks-per-node=2", words=LONG
    )
    submit.saved(job)
    command = "--partition=urgent", "--nodelist=n2", "--exclusive", "--wrap=true"
    urgent = submit.slurm.submit(*command, cwd=submit.directory, env=submit.env)

    assert submit.wait(urgent) == ["COMPLETED"]
    check_continued(submit, job)


@pytest.mark.parametrize("script", ["train.sbatch", "mpiexec.sbatch"])
def test_a_job_continues_after_a_rank_was_killed(submit: Submit, script):
    options = "--nodes=1", "--ntasks-per-node=2"
    job = submit.start(script, *options, words=LONG)
    kill_a_rank(submit.saved(job))
    states = submit.wait(job)
    shown = submit.outputs()

    assert states == ["COMPLETED"], submit.history(job)
    assert "it is started again (1 of 3)" in shown
    assert re.search(r"update \d+, resumed at [1-9]", shown), shown
    assert "the job is queued again" not in shown
    assert not list(submit.directory.glob("*.requeue"))


def test_a_job_is_queued_again_if_each_start_loses_a_rank(submit: Submit):
    (submit.directory / "program.py").write_text(LOSES)
    options = "--nodes=1", "--ntasks-per-node=1"
    job = submit.start("program.sbatch", *options, words=("--save", "saved"))
    shown = submit.until(job, "the job is queued again")
    submit.slurm.call("scancel", job)

    assert shown.count("started\n") == 1 + 3
    assert "it is not started again: --restarts 3" in shown


def kill_a_rank(saved: Path) -> None:
    """Kill one process that saves to a directory."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            # Jobs of another cluster on this machine may have the same numbers.
            beside = (folder / "cwd").readlink() == saved.parent
        except OSError:
            continue
        program, _, words = command.partition(" ")
        is_rank = program.endswith("python") and words.startswith("-m hpcaccum train ")
        if beside and is_rank and f"--save {saved.name}" in words:
            os.kill(int(folder.name), signal.SIGKILL)
            return
    pytest.fail(f"no rank was started with --save {saved.name}")


def test_a_rank_that_died_ends_the_job_if_srun_does_not(submit: Submit, mpi: str):
    (submit.directory / "dies.py").write_text(DIES)
    # One rank waits in MPI itself, where nothing reaches it.
    settings = f"export HPCACCUM_ON_LOSS=abort; srun --mpi={mpi} --kill-on-bad-exit=0"
    command = f"{settings} {sys.executable} dies.py"
    options = "--ntasks=3", "--nodes=1", "--output=dies-%j.out", f"--wrap={command}"
    job = submit.slurm.submit(*options, cwd=submit.directory, env=submit.env)

    assert submit.wait(job) == ["FAILED"], submit.outputs()
    shown = submit.outputs()
    assert "task 1: Killed" in shown
    # PMIx ends the job itself.
    reason = r"rank 0 of 3 failed, ending the job: rank 1 \(process .+ is lost: its "
    assert mpi == "pmix" or re.search(f"{reason}process has ended", shown)


def test_a_program_that_asks_for_it_is_started_again(submit: Submit):
    (submit.directory / "program.py").write_text(PROGRAM)
    options = "--nodes=2", "--ntasks-per-node=1"
    job = submit.start("program.sbatch", *options, words=("--x", "a b"))
    both = "started with ['--x', 'a b']\n" * 2
    submit.until(job, both)
    submit.slurm.call("scancel", "--signal=USR1", job)
    submit.again(job)

    assert submit.wait(job) == ["COMPLETED"], submit.outputs()
    assert submit.outputs().count("started with") == 4


def test_a_benchmark(submit: Submit):
    job, states = submit("bench.sbatch", "--nodes=2", "--ntasks-per-node=1")

    assert states == ["COMPLETED"], submit.outputs()
    table = (submit.directory / f"hpcaccum-bench-{job}.out").read_text()
    first, last = submit.log(f"hpcaccum-bench-{job}-2.jsonl")
    assert first["benchmark"] == last["benchmark"] == "step"
    assert first["hosts"] == {"n1": 1, "n2": 1}
    assert f"4 KiB {first['name']}" in table


def test_a_sweep_over_nodes(submit: Submit):
    options = "--nodes=2", "--ntasks-per-node=1"
    job, states = submit("sweep.sbatch", *options)

    assert states == ["COMPLETED"], submit.outputs()
    for nodes in 1, 2:
        facts = submit.log(f"hpcaccum-bench-{job}-{nodes}.jsonl")[0]
        assert (facts["ranks"], facts["nodes"]) == (nodes, nodes)
    assert re.search(r"1 on 1 +2 on 2\n", submit.outputs())
    assert (submit.directory / f"hpcaccum-bench-{job}.png").stat().st_size > 1000
