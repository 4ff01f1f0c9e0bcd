"""``hpcaccum train --record`` and ``hpcaccum replay``: the replay has the same bits.

Jobs train several times, and one process replays it: what takes time is to start.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

from .conftest import REPOSITORY, run_program

pytestmark = pytest.mark.mpi

COMMON = "--hidden", "8", "--batch", "8", "--epochs", "2"
# The last of several ranks is late. The others make each other's gradients stale, if no
# rank is at the end before another one begins.
LONG = "--epochs", "20"
RUNS = {
    "sync-replicas": ["--optimizer", "adam"],
    "drop-stale": ["--optimizer", "momentum", "--staleness", "0", *LONG],
    "agn": ["--optimizer", "adagrad", "--period", "3"],
}
# The records: of all strategies on 1 to 3 ranks, and of special cases.
NAMES = [f"{strategy}-{ranks}" for strategy in RUNS for ranks in (1, 2, 3)]
NAMES += ["stopped", "nodes", "dedicated"]

TRAIN = """
import sys
from hpcaccum.cli import main
for words, expected in {}:
    status = main(["train", *words])
    assert status == expected, (words, status)
"""
# Writes the status and the output of each replay.
REPLAY = """
import contextlib, io, json, pathlib, sys
from hpcaccum.cli import main

def attempt(words):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = main(["replay", *words])
        except SystemExit as leaving:
            status = leaving.code
    return status, shown.getvalue()

attempts = [attempt(words) for words in {}]
pathlib.Path("attempts.json").write_text(json.dumps(attempts))
"""


def train(mpirun, directory, ranks, runs, **env):
    """Run ``hpcaccum train`` with each of these options in one job."""
    (directory / "train.py").write_text(TRAIN.format(runs))
    env = {"PYTHONPATH": str(REPOSITORY), **env}
    result = mpirun(ranks, "train.py", cwd=directory, env=env)
    assert result.returncode == 0, result.stdout
    return result.stdout


def replay(directory, environment, *commands):
    """Run ``hpcaccum replay`` with each of these options, in one process."""
    (directory / "replay.py").write_text(REPLAY.format([*map(list, commands)]))
    env = environment | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "replay.py"]
    done = run_program(command, timeout=100, cwd=directory, env=env)
    assert done.returncode == 0, done.stdout
    return json.loads((directory / "attempts.json").read_text())


def updates_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:-1]]


def options(strategy, ranks, samples, name, *more):
    late = ["--straggler", f"{ranks - 1}:4"] if ranks > 1 else []
    words = ["--strategy", strategy, *COMMON, *RUNS[strategy], *late, *more]
    return [*words, "--data", str(samples), "--record", name]


@pytest.fixture(scope="module")
def records(mpirun, tmp_path_factory, samples):
    """A directory with the records."""
    directory = tmp_path_factory.mktemp("records")
    slow = ["--straggler", "0:4", "--epochs", "500", "--time-limit", "0.4s"]
    for ranks in 1, 2, 3:
        names = {strategy: f"{strategy}-{ranks}" for strategy in RUNS}
        runs = [(options(each, ranks, samples, names[each]), 0) for each in RUNS]
        if ranks == 2:
            stopped = options("drop-stale", 2, samples, "stopped", *slow)
            runs.append((stopped, os.EX_TEMPFAIL))
        shown = train(mpirun, directory, ranks, runs)
        assert all(f"record: {name}\n" in shown for name in names.values())
    late = ["--dedicated", "--staleness", "4", "--epochs", "2"]
    runs = [
        (options("sync-replicas", 3, samples, "nodes", "--quorum", "3"), 0),
        (options("drop-stale", 3, samples, "dedicated", *late), 0),
    ]
    # With MPICH each rank is a node.
    train(mpirun, directory, 3, runs, MPIR_CVAR_NOLOCAL="1")
    return directory


@pytest.fixture(scope="module")
def replays(records, mpi_environment):
    """The status and the output of the replay of each run, by name."""
    found = replay(records, mpi_environment, *([name] for name in NAMES))
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_has_the_bits_of_the_run(replays, records, name):
    status, shown = replays[name]
    total = len(updates_of(records / name))

    assert status == 0, shown
    assert f"repeated {total} of {total} updates; variables and slots are" in shown
    assert total > 0


def test_dropped_gradients_have_numbers(records):
    numbers = {}
    for update in updates_of(records / "drop-stale-3"):
        for rank, number, *_ in update["gradients"]:
            numbers.setdefault(rank, []).append(number)

    # Fewer are in updates than were computed.
    assert any(max(each) + 1 > len(each) for each in numbers.values())


def test_differences_are_named(records, replays, mpi_environment):
    header, *lines, end = (records / "stopped").read_text().splitlines()
    total = len(lines)
    swapped = [lines[0], lines[2], lines[1], *lines[3:]]
    momentum = json.loads(end)["digests"]["biases0/momentum"]
    changed = {
        "cut": [header, *lines],
        "swapped": [header, *swapped, end],
        "end": [header, *lines, end.replace(momentum, "0")],
        "widths": [header.replace('"widths": [', '"widths": [3, '), *lines, end],
        "before": [header.replace(f'["{np.__version__}"]', '["1.0"]'), *lines, end],
    }
    for name, text in changed.items():
        (records / name).write_text("\n".join(text))
    until = ["before", "--until", str(total - 1)]
    commands = [["cut"], ["swapped"], ["end"], until]
    commands += [["end", "--until", "9999"], ["end", "--data", "other.npz"]]
    commands += [["widths"]]
    np.savez(records / "other.npz", x=np.eye(20), y=np.arange(20) % 2)
    attempts = replay(records, mpi_environment, *commands)

    statuses, shown = zip(*attempts, strict=True)
    assert statuses == (2, 1, 1, 0, 2, 2, 2), shown
    assert "cut is not complete: its last line is missing" in shown[0]
    assert (
        "the replay differs: the record has update 3 in the place of update 2"
        in shown[1]
    )
    assert (
        "the replay differs: biases0/momentum differs after the last update" in shown[2]
    )
    assert f"NumPy is {np.__version__}, in the recorded run 1.0: " in shown[3]
    assert f"repeated {total - 1} of {total} updates; all losses so far" in shown[3]
    assert shown[3].split()[-1] != replays["stopped"][1].split()[-1]
    assert f"--until must be from 0 to {total}" in shown[4]
    assert "other.npz differs from the data of the recorded run" in shown[5]
    assert "widths: line 1 is damaged: layers of widths [3, " in shown[6]
