"""``hpcaccum run``: which ends of a command it starts again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from hpcaccum.launch.run import on_nodes_that_answer

from ..common import json_lines
from ..programs import run_program, start_program
from .conftest import REPOSITORY

RUN = sys.executable, "-m", "hpcaccum", "run"

# Each start takes the next word of a script: a status, or the number of a signal that
# kills it, after what it does before that.
PROGRAM = """
import os, pathlib, signal, sys, time

def save(folder=""):
    place = pathlib.Path("saved", folder)
    place.mkdir(parents=True, exist_ok=True)
    number = len(list(place.iterdir())) + 1
    (place / f"checkpoint-{number}.safetensors").touch()

def stop(*_):
    print("stopped", flush=True)
    sys.exit(75)

signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGINT, stop)
script = pathlib.Path("script")
end, *rest = script.read_text().split()
script.write_text(" ".join(rest))
print("start", flush=True)
*acts, status = end.split(",")
for act in acts:
    if act == "save":
        save()
    elif act == "group":
        save("group-1")
    elif act == "wait":
        pathlib.Path("waits").touch()
        time.sleep(60)
    else:
        pathlib.Path(os.environ["REQUEUE_FILE"]).write_text("restart" * (act == "may"))
if int(status) < 0:
    os.kill(os.getpid(), -int(status))
sys.exit(int(status))
"""


@pytest.fixture
def start(tmp_path):
    """Start ``hpcaccum run`` with a program that ends as a script says each time."""

    def run(script, *options, save=("--save", "saved")):
        (tmp_path / "script").write_text(script)
        (tmp_path / "program.py").write_text(PROGRAM)
        command = [*RUN, *options, "--", sys.executable, "program.py", *save]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return start_program(command, cwd=tmp_path, env=env)

    return run


@pytest.fixture
def run(start):
    """Return the status, how often the program was started, and what was shown."""

    def wait(*words, **options):
        process = start(*words, **options)
        shown = process.communicate(timeout=60)[0]
        return process.returncode, shown.splitlines().count("start"), shown

    return wait


# The model of one of two groups is enough; a file that asks for a start is allowed.
@pytest.mark.parametrize("end", ["75", "-11", "9", "14", "203", "may,75"])
def test_a_command_that_has_lost_a_rank_is_started_again(run, end):
    status, starts, shown = run(f"save,{end} group,{end} 0")

    assert (status, starts) == (0, 2 + 1), shown
    assert "it is started again (2 of 3)" in shown


@pytest.mark.parametrize("end", ["0", "1", "130"])
def test_other_ends_are_final(run, end):
    assert run(f"save,{end}") == (int(end), 1, "start\n")


@pytest.mark.parametrize(
    ("script", "options", "expected", "reason"),
    [
        ("75", (), (75, 1), "it has written no checkpoint to saved since its start"),
        ("save,75 -9", (), (137, 2), "it has written no checkpoint to saved since"),
        ("save,75 " * 2, ("--restarts", "1"), (75, 2), "--restarts 1"),
        ("save,75", ("--restarts", "0"), (75, 1), "--restarts 0"),
        ("save,stop,75", (), (75, 1), "it was asked to stop"),
    ],
)
def test_it_says_why_it_gives_up(run, tmp_path, script, options, expected, reason):
    status, starts, shown = run(script, *options)

    assert (status, starts) == expected, shown
    assert f"; it is not started again: {reason}" in shown
    assert not list(tmp_path.glob("*.requeue"))


def test_the_file_of_a_batch_script_stays(run, tmp_path, monkeypatch):
    monkeypatch.setenv("REQUEUE_FILE", str(tmp_path / "job.requeue"))

    assert run("save,stop,75")[:2] == (75, 1)
    assert (tmp_path / "job.requeue").exists()


def test_an_option_names_the_directory(run):
    option = "--checkpoints", "saved"

    assert run("save,75 0", *option, save=())[:2] == (0, 2)
    assert run("save,75 0", *option, save=["--save=other"])[:2] == (0, 2)
    assert "no --save DIR" in run("save,75", save=())[2]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_the_command_and_ends_the_run(start, tmp_path, number):
    process = start("save,wait,75 0")
    limit = time.monotonic() + 30
    while not (tmp_path / "waits").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(number)
    shown = process.communicate(timeout=60)[0]

    assert process.returncode == 75
    assert shown.count("start\n") == shown.count("stopped\n") == 1
    assert f"not started again: {number.name} has asked it to stop" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "hpcaccum run: error: no command: hpcaccum run [options] -- mpiexec"),
        (["--", "no-such"], "hpcaccum run: error: there is no program no-such"),
    ],
)
def test_a_command_that_cannot_be_started(words, message):
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*RUN, *words], capture_output=True, text=True, env=env)

    assert done.returncode == 2
    assert message in done.stderr


# Kills a rank of a training when there are two checkpoints, but not of one that
# continues.
DYING = """
import os, signal, sys, threading, time
from mpi4py import MPI
from hpcaccum import checkpoint
from hpcaccum.cli import main

def die():
    while len(checkpoint.files("saved")) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    if MPI.COMM_WORLD.rank == 1 and not checkpoint.files("saved"):
        threading.Thread(target=die, daemon=True).start()
    sys.exit(main())
"""


@pytest.mark.mpi
def test_a_training_continues_after_a_rank_was_killed(
    mpiexec, mpi_environment, script, tmp_path, digits
):
    train = ["train", "--strategy", "sync-replicas", "--hidden", "8", "--batch", "64"]
    train += ["--straggler", "0:10", "--straggler", "1:10", "--every", "20"]
    train += ["--epochs", "10"]
    train += ["--save", "saved", "--resume", "--log", "log.jsonl", "--data", digits]
    command = [*RUN, "--", mpiexec, "-n", "2", sys.executable, script(DYING), *train]
    done = run_program(
        [*map(str, command)], timeout=120, cwd=tmp_path, env=mpi_environment
    )

    assert done.returncode == 0, done.stdout
    assert "it is started again (1 of 3)" in done.stdout
    # The last rank to leave may have made one more update alone.
    assert re.search(r"update 11[34], resumed at [1-9]", done.stdout), done.stdout
    events = [line["event"] for line in json_lines(tmp_path / "log.jsonl")]
    events = [event for event in events if event != "look"]
    # Open MPI's mpiexec asks the other rank to stop, which may come to a result.
    assert events in (["start", "start", "result"], ["start", "result"] * 2)


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NNODES": "4",
    "SLURM_OVERLAP": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
}
# The node n2 does not start a program.
STUBS = {
    "srun": "printf '%s\\n' n4 n1 n3",
    "squeue": "echo 4",
    "scontrol": "printf '%s\\n' n1 n2 n3 n4",
    "mpiexec": "",
    "python": "",
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "srun -N4 -n 8 python -n 8",
            "srun -N3 -n 6 --nodelist=n1,n3,n4 python -n 8",
        ),
        ("srun -l python", "srun -l --nodelist=n1,n3,n4 python"),
        (
            "srun --nodes=2 --ntasks=6 python",
            "srun --nodes=2 --ntasks=6 --nodelist=n1,n3 python",
        ),
        ("mpiexec -ppn 2 -n 8 python", "mpiexec -ppn 2 -n 6 python"),
    ],
)
def test_a_command_for_the_nodes_that_answer(tmp_path, monkeypatch, command, expected):
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)

    assert " ".join(on_nodes_that_answer(command.split())) == expected
    left = {name: os.environ[name] for name in JOB}
    assert left == {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1,n3,n4",
        "SLURM_NNODES": "3",
        "SLURM_OVERLAP": "1",
        "SLURM_NTASKS": "6",
        "SLURM_TASKS_PER_NODE": "2(x3)",
    }
