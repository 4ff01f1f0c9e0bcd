"""The programs of examples/ run as they are, and do what they say."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hpcaccum import checkpoint
from hpcaccum.errors import RESTART

from ..system.conftest import REPOSITORY

ENV = {"HPCACCUM_TIMEOUT": "60"}

# Runs a program that takes some seconds; SIGUSR1 comes to this rank shortly after the
# program expects it. It is a request if no rank is found to be lost for a while.
ASKED = """
import os, runpy, signal, sys, threading, time
import hpcaccum as hpc

def slow(opt, *args, minimize=hpc.DropStaleGradientOptimizer.minimize):
    time.sleep(1e-3)
    return minimize(opt, *args)

hpc.DropStaleGradientOptimizer.minimize = slow

def ask():
    while signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)

threading.Thread(target=ask, daemon=True).start()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("program", "shown"),
    [
        ("torch_digits.py", r"([\d.]+)% correct"),
        ("jax_digits.py", r"(?m)^test accuracy ([\d.]+)%$"),
    ],
)
def test_digits(mpirun, program, shown):
    result = mpirun(2, REPOSITORY / "examples" / program, env=ENV, status=0)

    (share,) = re.findall(shown, result.stdout)
    assert float(share) > 85


def test_torch_stragglers(mpirun):
    program = REPOSITORY / "examples" / "torch_stragglers.py"
    result = mpirun(3, program, env=ENV, status=0)

    rows = re.findall(r"^([\w-]+) +([\d.]+) +(\d+)  (.*)$", result.stdout, re.MULTILINE)
    updates = {name: int(number) for name, _, number, _ in rows}
    assert updates["cross-shard"] == 40
    assert updates["sync-replicas"] >= 60
    assert updates["drop-stale"] >= 120
    assert updates["agn"] >= 12


@pytest.mark.parametrize("strategy", ["cross-shard", "agn", "local-steps"])
def test_torch_text(mpirun, strategy):
    program = REPOSITORY / "examples" / "torch_text.py"
    result = mpirun(2, program, strategy, "--steps", "100", env=ENV, status=0)

    (bits,) = re.findall(r"([\d.]+) bits a character", result.stdout)
    # A character of 96 has 6.6 bits if nothing is known about it.
    assert float(bits) < 6


def test_overlap(mpirun):
    program = REPOSITORY / "examples" / "overlap.py"
    small = ("--megabytes", "0.1", "--seconds", "0.001", "--period", "8")
    later = ("--fragments", "4", "--overlap", "1", "--wire-dtype", "bfloat16")
    result = mpirun(2, program, *small, *later, env=ENV, status=0)

    shown = re.findall(r"^rank (\d): of .* in waits", result.stdout, re.MULTILINE)
    assert shown == ["0", "1"]


def test_requeue(mpirun, tmp_path):
    program, asked = REPOSITORY / "examples" / "requeue.py", tmp_path / "asked.py"
    asked.write_text(ASKED)
    queued = tmp_path / "job.requeue"
    env = ENV | {"REQUEUE_FILE": str(queued)}
    # MPICH combines the statuses of all ranks bit by bit.
    first = mpirun(3, asked, program, cwd=tmp_path, env=env, status=RESTART)

    (until,) = re.findall(r"^updates 0 to (\d+)$", first.stdout, re.MULTILINE)
    assert int(until) < 12_000
    assert queued.exists()

    # The next run has another number of ranks, and ends.
    queued.unlink()
    second = mpirun(2, program, cwd=tmp_path, env=env, status=0)

    assert re.search(rf"^updates {until} to 120\d\d$", second.stdout, re.MULTILINE)
    assert not queued.exists()
    last = checkpoint.load(tmp_path / "saved-requeue")
    np.testing.assert_allclose(last["variables"]["w"], 1, atol=0.01)
