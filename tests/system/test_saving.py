"""``hpcaccum train --save``: what a job continues that follows another one."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time

import numpy as np
import pytest

import hpcaccum
from hpcaccum import checkpoint

from ..programs import run_program, start_program
from .conftest import REPOSITORY
from .test_run import DYING

pytestmark = pytest.mark.mpi

# A batch script looks for the file, and queues its job again.
ENVIRONMENT = {"REQUEUE_FILE": "requeue"}
COMMON = "-m", "hpcaccum", "train", "--save", "saved", "--hidden", "8", "--batch", "64"


@pytest.fixture
def common(digits):
    """How a run begins. To import scikit-learn would take longer than the rest."""
    return *COMMON, "--data", digits


@pytest.fixture
def train(mpirun, tmp_path, common):
    """Run ``hpcaccum train`` and return what it shows."""

    def run(*options, ranks=2, status=0):
        result = mpirun(
            ranks, *common, *options, cwd=tmp_path, env=ENVIRONMENT, status=status
        )
        return result.stdout

    return run


def last(directory):
    state = checkpoint.load(directory / "saved")
    assert state is not None
    return state


@pytest.mark.parametrize(
    "options",
    [
        ["drop-stale", "--dedicated", "--servers", "1"],
        ["agn", "--period", "4", "--servers", "auto"],
    ],
    ids=["drop-stale", "agn"],
)
def test_a_job_continues_one_that_was_killed(train, mpirun, tmp_path, common, options):
    words = ["--strategy", *options, "--every", "5"]
    slow = ["--straggler", "1:20", "--straggler", "0:20"]
    program = tmp_path / "program.py"
    program.write_text(DYING)
    command = program, *common[2:], *words, *slow
    job = mpirun(2, *command, cwd=tmp_path, env=ENVIRONMENT)
    step, asked = last(tmp_path)["step"], (tmp_path / "requeue").exists()
    shown = train(*words, "--resume", "--epochs", "40")
    found = last(tmp_path)

    assert job.returncode != 0
    assert asked
    assert not (tmp_path / "requeue").exists()
    assert step >= 10
    assert f"resumed at {step}" in shown
    assert found["step"] == found["optimizer"]["global_step"] > step
    # The gradients of both jobs are counted; that of the update before the checkpoint
    # may have been counted after it.
    assert sum(found["optimizer"]["tally"]["accepted"]) >= found["step"] - 1
    assert len(checkpoint.files(tmp_path / "saved")) == 3


def test_a_job_of_fewer_ranks_continues(train, tmp_path):
    words = "--strategy", "drop-stale", "--every", "5"
    train(*words, "--epochs", "2", ranks=2)
    tally = last(tmp_path)["optimizer"]["tally"]
    shown = train(*words, "--epochs", "3", "--resume", ranks=1)

    # The other rank keeps its counts, and has waited for nothing.
    table = [line.split() for line in shown.splitlines()]
    counts = str(tally["accepted"][1]), str(tally["dropped"][1])
    assert ["1", *counts, "0.00", "s"] in table
    assert "epoch 3 of 3" in shown
    assert "epoch 1 of 3" not in shown
    assert last(tmp_path)["step"] == 68


def test_the_later_of_two_jobs_goes_on(
    train, mpiexec, mpi_environment, tmp_path, common
):
    # As after a requeue, when ranks of the first run still live.
    words = "--strategy", "drop-stale", "--every", "1"
    slow = "--straggler", "0:100", "--straggler", "1:100", "--epochs", "1000"
    command = [mpiexec, "-n", "2", sys.executable, *common, *words, *slow]
    env = mpi_environment | ENVIRONMENT | {"REQUEUE_FILE": "first"}
    first = start_program(command, cwd=tmp_path, env=env)
    while not (tmp_path / "first").exists():
        assert first.poll() is None
        time.sleep(0.05)
    shown = train(*words, "--resume", "--epochs", "20")
    output, _ = first.communicate(timeout=60)

    assert first.returncode != 0
    assert "error: --save saved: another run saves here now (process " in output
    assert "Traceback" not in output
    assert "resumed at" in shown
    assert f"update {last(tmp_path)['step']}, resumed" in shown
    # If it were queued again, it would end the second job in turn.
    assert not (tmp_path / "first").exists()
    # Checkpoints of the second job only.
    made = [
        checkpoint.load(each)["step"] for each in checkpoint.files(tmp_path / "saved")
    ]
    assert made == sorted(made)


def test_a_model_that_is_not_finite_is_not_saved(train, tmp_path):
    options = "--strategy", "drop-stale", "--epochs"
    train(*options, "1")
    step = last(tmp_path)["step"]
    (tmp_path / "requeue").touch()  # as after a checkpoint
    diverging = "--resume", "--rate", "1e20", "--every", "1"
    shown = train(*options, "2", *diverging, status=1)

    assert "the model has NaN or infinite values and is not saved" in shown
    found = last(tmp_path)
    assert found["step"] >= step
    assert np.isfinite(np.concatenate([v.ravel() for v in arrays_of(found)])).all()
    assert not (tmp_path / "requeue").exists()


def arrays_of(state):
    return list(state["optimizer"]["variables"].values())


def test_what_cannot_be_continued_is_refused(train, tmp_path):
    options = "--strategy", "cross-shard", "--epochs", "1", "--log", "log.jsonl"
    train(*options, ranks=1)
    log = (tmp_path / "log.jsonl").read_text()

    def refused(*others):
        shown = train(*others, ranks=1, status=2)
        assert shown.count("error: ") == 1
        assert "Traceback" not in shown
        return shown

    assert "saved has checkpoints: add --resume" in refused(*options)
    agn = refused("--strategy", "agn", "--resume")
    assert "a run with --strategy cross-shard, this one has --strategy agn" in agn
    widths = refused(*options, "--resume", "--hidden", "9")
    assert "with network 64-8-10, this one has network 64-9-10" in widths
    for path in checkpoint.files(tmp_path / "saved"):
        path.write_bytes(b"no checkpoint")
    assert "--resume: saved/checkpoint-1.safetensors is damaged" in refused(
        *options, "--resume"
    )
    checkpoint.save(tmp_path / "saved", {"mine": 1})
    assert "checkpoints of another program" in refused(*options, "--resume")
    assert (tmp_path / "log.jsonl").read_text() == log


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_does_not_end_the_training_until_its_end(
    mpiexec, mpi_environment, tmp_path, common
):
    (tmp_path / "saved").mkdir()
    # Room for one checkpoint of 20 KB, not for two.
    command = [
        *["unshare", "--mount", "sh", "-c"],
        'mount -t tmpfs -o size=28k none saved && "$@"; s=$?; ls saved; exit $s',
        *["sh", mpiexec, "-n", "2", sys.executable, *common, "--hidden", "64"],
        *["--strategy", "drop-stale", "--every", "10", "--epochs", "2"],
    ]
    result = run_program(command, timeout=100, cwd=tmp_path, env=mpi_environment)

    assert result.returncode != 0
    assert "No space left on device" in result.stdout
    assert "training goes on" in result.stdout
    assert "epoch 2 of 2" not in result.stdout or "--save saved:" in result.stdout
    assert "checkpoint-1.safetensors" in result.stdout
    assert "Traceback" not in result.stdout


def test_a_program_uses_the_model_as_the_page_shows(train, tmp_path):
    # Large and small features, one that is constant, and labels of few bytes.
    rng, path = np.random.default_rng(0), tmp_path / "own.npz"
    y = rng.choice(np.array([3, 250], "u1"), 400)
    x = np.array([1000.0, 0.01, 0]) * rng.standard_normal((400, 3)) + 7
    x[:, :2] += np.array([3000, 0.02]) * (y == 3)[:, None]
    np.savez(path, x=x, y=y, x_test=x, y_test=y)
    shown = train("--strategy", "cross-shard", "--data", path, "--epochs", "4")
    page = (REPOSITORY / "docs" / "programs.md").read_text()
    after = page.partition("A program uses the model")[2]
    lines = re.search(r"(?:^    .*\n)+", after, re.MULTILINE)
    lines = textwrap.dedent(lines[0]).replace("saved-train", str(tmp_path / "saved"))
    found = {"np": np, "hpcaccum": hpcaccum, "x": x}
    exec(lines, found)

    assert set(found["predicted"]) == {3, 250}
    accuracy = f"{np.mean(found['predicted'] == y):.1%}"
    assert re.search(rf"^cross-shard +{accuracy}", shown, re.MULTILINE)
    assert np.mean(found["predicted"] == y) > 0.9
    assert "each feature is scaled to mean 0 and deviation 1" in shown
