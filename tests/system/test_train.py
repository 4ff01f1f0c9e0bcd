"""``hpcaccum train`` as a user runs it: its output, files and exit status."""

from __future__ import annotations

import functools
import json
import struct
import sys
from dataclasses import dataclass

import pytest

from ..common import json_lines
from ..programs import run_program
from .conftest import REPOSITORY

pytestmark = pytest.mark.mpi

STRATEGIES = ["cross-shard", "sync-replicas", "drop-stale", "agn", "local-steps"]


@pytest.fixture
def train(mpirun, tmp_path):
    """Run ``hpcaccum train`` on some ranks, in an empty directory."""
    return functools.partial(run_train, mpirun, tmp_path)


def run_train(mpirun, directory, ranks, *options, status=0, **env):
    words = "-m", "hpcaccum", "train", *options
    return mpirun(ranks, *words, cwd=directory, env=env, status=status).stdout


@dataclass
class Comparison:
    """What a run on 3 ranks of which the last is slow has written."""

    shown: str
    log: list[dict]
    picture: bytes
    trace: dict

    def of(self, strategy):
        """Return the looks at the model of one strategy, and its result."""
        *looks, result = [r for r in self.log[1:] if r["strategy"] == strategy]
        return looks, result


@pytest.fixture(scope="module")
def comparison(mpirun, tmp_path_factory):
    directory = tmp_path_factory.mktemp("comparison")
    words = "--straggler", "2:8", "--seed", "3", "--epochs", "12", "--log", "log.jsonl"
    words = *words, "--trace", "trace.json"
    shown = run_train(mpirun, directory, 3, "--compare", *words)
    picture = (directory / "hpcaccum-compare.png").read_bytes()
    trace = json.loads((directory / "trace.json").read_text())
    return Comparison(shown, json_lines(directory / "log.jsonl"), picture, trace)


def check_start(start, shown):
    for title in "test accuracy", "updates/s", "samples/s", "accepted", "waited":
        assert title in shown
    assert start["event"] == "start"
    assert start["ranks"] == sum(start["hosts"].values()) == 3
    assert start["options"]["seed"] == 3
    assert start["data"]["train"] + start["data"]["test"] == 1797
    assert "MPI" in start["mpi"]


def check_records(looks, result, shown):
    assert {look["event"] for look in looks} == {"look"}
    assert result["event"] == "result"
    assert [look["step"] for look in looks] == sorted({look["step"] for look in looks})
    assert looks[-1]["accuracy"] == result["accuracy"] >= 0.9
    assert f"{looks[-1]['accuracy']:.1%}" in shown
    accepted = result["accepted"]
    assert sum(result["lags"].values()) == sum(accepted) + sum(result["dropped"])
    assert f"{sum(accepted)}" in shown
    assert [bool(each) for each in result["gradient_seconds"]] == [True] * len(accepted)
    assert all(look["noise_scale"] > 0 for look in looks[:2])


def test_table_and_log_of_one_strategy(train, tmp_path):
    words = "--epochs", "10", "--rate", "0.5", "--seed", "3", "--log", "log.jsonl"
    shown = train(3, "--strategy", "agn", *words)

    start, *looks, result = json_lines(tmp_path / "log.jsonl")
    check_start(start, shown)
    check_records(looks, result, shown)
    assert "agn: epoch 10 of 10" in shown


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_table_and_log_of_each_strategy(strategy, comparison):
    start, shown = comparison.log[0], comparison.shown
    looks, result = comparison.of(strategy)

    check_start(start, shown)
    check_records(looks, result, shown)
    epochs = start["options"]["epochs"]
    assert f"{strategy}: epoch {epochs} of {epochs}" in shown
    accepted, updates = result["accepted"], result["updates"]
    if strategy == "cross-shard":
        assert accepted == [updates] * 3
    elif strategy in ("sync-replicas", "local-steps"):
        # The last rank to leave may have made one more update alone.
        assert sum(accepted) >= updates * start["options"]["quorum"] - 1
    else:
        assert sum(accepted) == updates


def test_compare_reaches_95_percent_with_each_and_draws_them(comparison):
    results = {r["strategy"]: r for r in comparison.log if r["event"] == "result"}
    assert list(results) == STRATEGIES
    for result in results.values():
        assert result["accuracy"] >= 0.95, result["strategy"]
    # The slow rank is shown, and waits least; another does more where it need not wait.
    assert comparison.shown.count("2 (+8 ms)") == len(STRATEGIES)
    waited = results["cross-shard"]["waited"]
    assert waited[2] < min(waited[:2])
    for strategy in STRATEGIES[1:]:
        accepted = results[strategy]["accepted"]
        assert accepted[2] < max(accepted[:2])
    picture = comparison.picture
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">II", picture[16:24]) == (1728, 1080)
    assert len(picture) > 30_000


def test_trace_of_a_comparison_shows_each_strategy_on_each_rank(comparison):
    events = comparison.trace["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for name in [*STRATEGIES, "compute", "wait"]:
        shown = {rows[e["tid"]] for e in events if e["name"] == name}
        assert {"rank 0", "rank 1", "rank 2"} <= shown, name
    begins = [min(e["ts"] for e in events if e["name"] == name) for name in STRATEGIES]
    assert begins == sorted(begins)


def test_own_data_and_picture(train, tmp_path, samples):
    words = "--data", samples, "--hidden", "8,8", "--plot", "own.svg"
    shown = train(2, "--strategy", "drop-stale", *words, "--epochs", "5")

    assert "own.npz: " in shown
    assert "network 2-8-8-2" in shown
    assert "100.0%" in shown
    assert (tmp_path / "own.svg").read_text().count("<path") > 20


def test_a_loss_that_is_not_finite_is_a_failure(train, digits):
    options = ["--strategy", "cross-shard", "--epochs", "2", "--rate", "1e20"]
    shown = train(2, "--data", digits, *options, status=1)

    assert shown.count("error: the loss is not finite (cross-shard)") == 1
    assert "one gradient: the mean of 16 samples" in shown
    assert "Traceback" not in shown


def test_a_model_that_diverged_is_drawn_however_long_it_takes(
    patched, tmp_path, digits
):
    # Longer than the other rank waits for this one when it exits.
    text = """
import time
from hpcaccum.train import plot
draw = plot.draw
plot.draw = lambda *args: time.sleep(4) or draw(*args)
"""
    words = "--strategy", "agn", "--epochs", "1", "--rate", "1e20", "--plot", "p.png"
    words = "train", "--data", digits, *words
    result = patched(2, text, *words, cwd=tmp_path, status=1)

    assert "picture: p.png" in result.stdout
    assert (tmp_path / "p.png").exists()
    assert "hpcaccum train: error: the loss is not finite (agn)" in result.stdout
    assert "Warning" not in result.stdout


def test_on_a_device(train, tmp_path, simulator):
    words = "--compare", "--epochs", "5", "--batch", "64", "--rate", "0.5", "--no-plot"
    words += "--device", "cuda", "--log", "log.jsonl"
    shown = train(2, *words, PYTHONPATH=f"{REPOSITORY}:{simulator}")

    assert "simulated" in shown
    start, *_ = json_lines(tmp_path / "log.jsonl")
    assert "simulated" in start["device"]
    results = [r for r in json_lines(tmp_path / "log.jsonl") if r["event"] == "result"]
    assert len(results) == len(STRATEGIES)
    assert all(result["accuracy"] > 0.8 for result in results)


def test_missing_device_is_reported_once(train, simulator):
    env = {"PYTHONPATH": f"{REPOSITORY}:{simulator}", "CUPY_SIMULATOR_DEVICES": "0"}
    shown = train(2, "--strategy", "agn", "--device", "cuda", status=1, **env)

    assert shown.count("hpcaccum train: error:") == 1
    assert "finds no CUDA device" in shown
    assert "Traceback" not in shown


def test_ranks_with_different_options_are_reported(mpi_environment, mpiexec, tmp_path):
    one = ["-n", "1", sys.executable, "-m", "hpcaccum", "train", "--strategy"]
    result = run_program(
        [mpiexec, *one, "agn", ":", *one, "drop-stale"],
        timeout=200,
        cwd=tmp_path,
        env=mpi_environment,
    )

    assert result.returncode == 2, result.stdout
    assert "strategy must be the same on all 2 ranks" in result.stdout


def test_help_is_given_once(mpirun, tmp_path):
    result = mpirun(3, "-m", "hpcaccum", "--help", cwd=tmp_path)

    assert result.stdout.count("usage: hpcaccum") == 1


EXITS = """
from hpcaccum.mpi import MPI
from hpcaccum.train.model import MLP
if MPI.COMM_WORLD.rank == 1:
    MLP.loss_and_gradients = lambda *_: sys.exit(7)
"""


def test_an_exit_on_one_rank_ends_the_job(patched, tmp_path, samples):
    words = "train", "--strategy", "agn", "--data", samples, "--epochs", "100000"
    result = patched(2, EXITS, *words, cwd=tmp_path)

    assert result.returncode != 0
    assert "rank 1: hpcaccum train: ended with status 7" in result.stdout
