"""``hpcaccum train`` that is asked to stop: all ranks end at one step, and save."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hpcaccum import checkpoint

pytestmark = pytest.mark.mpi

COMMON = "--hidden", "8", "--batch", "64", "--epochs", "20"
SLOW = "--straggler", "0:20", "--straggler", "1:20"

# Asks one rank with a signal, shortly after the training has begun.
ASKING = """
import os, signal, threading, time
from mpi4py import MPI

def ask():
    while signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.{name})

if MPI.COMM_WORLD.rank == {rank}:
    threading.Thread(target=ask, daemon=True).start()
"""

# Asks one rank while the data are read, when MPICH would ignore the signal.
EARLY = """
import os, signal
from mpi4py import MPI
from hpcaccum.train import command

def load(*args, read=command.load):
    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return read(*args)

command.load = load
"""

# Asks one rank when Python has restored its own handlers of signals, at its end.
LATE = """
import os, signal
from mpi4py import MPI

class Ask:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGUSR1):
        kill(process, number)

if MPI.COMM_WORLD.rank == 1:
    late = Ask()
"""


@pytest.fixture
def train(patched, tmp_path, digits):
    """Run ``hpcaccum train`` on two ranks; return what it shows."""

    def run(*options, status=0, before=""):
        words = "train", *COMMON, "--data", digits, *options
        env = {"REQUEUE_FILE": "requeue"}
        result = patched(2, before, *words, cwd=tmp_path, env=env, status=status)
        assert "Traceback" not in result.stdout
        return result.stdout

    return run


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("cross-shard", "SIGUSR1"), ("sync-replicas --quorum 2", "SIGTERM")],
    ids=["cross-shard", "sync-replicas"],
)
def test_a_stopped_run_that_goes_on_has_the_bits_of_one(
    train, tmp_path, strategy, name
):
    options = "--strategy", *strategy.split(), "--optimizer", "adam"
    train(*options, "--save", "whole")
    asked = {"before": ASKING.format(name=name, rank=1), "status": os.EX_TEMPFAIL}
    shown = train(*options, *SLOW, "--save", "parts", **asked)
    step = checkpoint.load(tmp_path / "parts")["step"]
    again = train(*options, "--save", "parts", "--resume")
    whole, parts = (checkpoint.load(tmp_path / each) for each in ("whole", "parts"))

    assert 0 < step < whole["step"] == parts["step"]
    assert f"update {step}, from the start; stopped before {whole['step']} (" in shown
    assert f"checkpoints: parts; update {parts['step']}, resumed at {step}" in again
    for part in "variables", "state":
        np.testing.assert_equal(parts["optimizer"][part], whole["optimizer"][part])


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("drop-stale --dedicated", 0), ("agn --period 3", 1), ("sync-replicas", 1)],
)
def test_any_rank_stops_all(train, tmp_path, strategy, rank):
    options = "--strategy", *strategy.split(), "--save", "saved", "--trace", "t.json"
    asked = ASKING.format(name="SIGTERM", rank=rank)
    train(*options, *SLOW, before=asked, status=os.EX_TEMPFAIL)
    assert '"name":"compute"' in (tmp_path / "t.json").read_text()
    found = checkpoint.load(tmp_path / "saved")
    tally = found["optimizer"]["tally"]

    assert found["step"] == found["optimizer"]["global_step"] > 0
    assert (tmp_path / "requeue").exists()
    if "sync" not in strategy:
        # All gradients under way were taken.
        assert sum(tally["accepted"]) == found["step"]


def test_a_request_before_the_training_counts(train):
    words = *SLOW, "--strategy", "sync-replicas"
    shown = train(*words, before=EARLY, status=os.EX_TEMPFAIL)

    assert "asked to stop: training ends here" in shown


def test_a_request_after_the_training_does_not_end_it(train):
    train("--strategy", "agn", "--epochs", "1", before=LATE)


def test_a_time_limit_needs_no_checkpoint(train):
    options = "--strategy", "cross-shard", *SLOW, "--time-limit", "0.5s"
    shown = train(*options, status=os.EX_TEMPFAIL)

    assert "from the start; stopped before 226\n" in shown
