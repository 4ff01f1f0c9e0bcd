"""The parts of ``hpcaccum train``: data and loop, without the command line."""

import argparse

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.train.data import load, prepare
from hpcaccum.train.loop import Run
from hpcaccum.train.options import add_arguments, resolve
from hpcaccum.train.saving import Saver

pytestmark = pytest.mark.any_size


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


@pytest.mark.ranks(min=2)
def test_a_slow_rank_does_not_hold_up_the_end(comm, size):
    # Three classes that are easily separated.
    y = np.arange(300) % 3
    x = 3 * np.eye(3)[y] + np.random.default_rng(0).standard_normal((300, 3))
    data, parser = prepare("blobs", {"x": x, "y": y}), argparse.ArgumentParser()
    add_arguments(parser)
    # Ten batches make a push of AGN: 4 s, more than all others need together.
    words = "--strategy", "agn", "--epochs", "4", "--straggler", f"{size - 1}:400"
    chosen = resolve(parser.parse_args(words), size)
    saver = Saver(chosen, comm.rank, data)
    group, show = hpc.group_of(comm), lambda _: None
    with hpc.Stopping(comm, signals=False) as stop:
        result = Run("agn", chosen, data, group, show, stop, saver)()

    assert result.accepted[-1] == 0
    assert result.seconds < 3
