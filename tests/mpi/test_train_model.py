"""The parts of ``hpcaccum train``: data and loop, without the command line."""

import argparse

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.train.data import load, prepare
from hpcaccum.train.loop import Run
from hpcaccum.train.options import PERIODIC, STRATEGIES, add_arguments, resolve
from hpcaccum.train.saving import Saver

pytestmark = pytest.mark.any_size


def options(ranks, *words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args(words), ranks)


@pytest.fixture(scope="session")
def blobs():
    """Three classes that are easily separated."""
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    centers = np.array([[0, 0, 3], [0, 3, 0], [3, 0, 0]])
    x = centers[y] + rng.standard_normal((300, 3))
    return prepare("blobs", {"x": x, "y": y})


@pytest.mark.slow
# The only test that loads scikit-learn, on rank 0: that takes 2 s.
@pytest.mark.ranks(2)
def test_the_digits_are_the_same_on_all_ranks(comm):
    data = load(None, hpc.group_of(comm))
    arrays = data.x, data.y, data.x_test, data.y_test

    assert comm.allgather([a.tobytes() for a in arrays]) == comm.size * [
        [a.tobytes() for a in arrays]
    ]
    assert len(data.y) + len(data.y_test) == 1797
    assert np.bincount(data.y_test).min() >= 34
    np.testing.assert_allclose(data.x.mean(axis=0), 0, atol=1e-5)


def test_bad_data_is_an_error_on_all_ranks(comm, tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.ones((10, 2)), y=np.ones(9, int))

    with pytest.raises(hpc.InvalidArgumentError, match="y must be integers"):
        load(path, hpc.group_of(comm))


def train(strategy, chosen, blobs, comm, show):
    saver = Saver(chosen, comm.rank, blobs)
    with hpc.Stopping(comm, signals=False) as stop:
        return Run(strategy, chosen, blobs, hpc.group_of(comm), show, stop, saver)()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_learns_and_adds_up(strategy, blobs, comm, size):
    period = ["--period", "3"] if strategy in PERIODIC else []
    chosen = options(size, "--strategy", strategy, "--epochs", "8", *period)
    shown = []
    result = train(strategy, chosen, blobs, comm, shown.append)

    assert comm.allgather(result) == [result] * size
    assert result.accuracy >= 0.9
    assert len(result.accepted) == len(result.dropped) == len(result.waited) == size
    gradients = sum(result.accepted) + sum(result.dropped)
    assert sum(result.lags.values()) == gradients
    assert sum(result.accepted) * result.gradient_samples >= 8 * 240
    assert sum(result.lag_shares()) == pytest.approx(1)
    seconds = [record.seconds for record in result.records]
    assert seconds == sorted(seconds)
    assert result.records[-1].step == result.updates
    assert shown == (list(result.records) if comm.rank == 0 else [])


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_dedicated_host_does_not_train(strategy, blobs, comm, size):
    chosen = options(size, "--strategy", strategy, "--epochs", "4", "--dedicated")
    shown = []
    result = train(strategy, chosen, blobs, comm, shown.append)

    assert result.accepted[0] == result.dropped[0] == 0
    assert sum(result.accepted) > 0
    assert bool(shown) == (comm.rank == 1)


@pytest.mark.ranks(min=2)
def test_a_slow_rank_does_not_hold_up_the_end(blobs, comm, size):
    # Ten batches make a push of AGN: 4 s, more than all others need together.
    words = "--strategy", "agn", "--epochs", "4", "--straggler", f"{size - 1}:400"
    chosen = options(size, *words)
    result = train("agn", chosen, blobs, comm, lambda _: None)

    assert result.accepted[-1] == 0
    assert result.seconds < 3
