"""CrossShardOptimizer: a call of one rank is interrupted, and all ranks go back."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError
from hpcaccum.optimizers.shard_reducer import ShardReducer
from hpcaccum.reducer import Reducer, RowExchange, row_exchange

from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.own_comm]

# Where a step is interrupted: before, in or after the exchange.
PLACES = {
    "begun": (Reducer, "_finish"),
    "reduced": (Reducer, "_exchange"),
    "rows reduced": (ShardReducer, "_collect"),
    "rows sent": (RowExchange, "_gather"),
    "rows read": (row_exchange, "_sum"),
    "counted": (ShardReducer, "count"),
    "updated": (hpc.SGD, "apply_gradients"),
}


def interrupted(*_args, **_options):
    raise KeyboardInterrupt


@pytest.fixture(params=["memory", "messages"], autouse=True)
def _way(request, monkeypatch):
    """How rows travel on one node; between nodes, they always do in messages."""
    if request.param == "messages":
        monkeypatch.setattr(row_exchange, "_MOST_BYTES", 0)


def step(opt, rank):
    rows = hpc.IndexedSlices(np.ones((rank + 1, 2)), np.arange(rank + 1))
    return opt.minimize(gives(rows, np.full(3, rank + 1.0)))


def go_back(opt, snapshot):
    """Restore a snapshot, when all ranks do."""
    while isinstance(error := raised(opt.restore, snapshot), DisagreementError):
        """Another rank waits in a step, and gets the same error."""
    assert error is None, error


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_go_on_after_restore(make, rank, size, place, which, monkeypatch):
    if place == "rows sent" and row_exchange._MOST_BYTES:
        pytest.skip("no rows are sent")
    monkeypatch.setattr("hpcaccum.mpi.control._PATIENCE", 0.03)
    w = hpc.Variable(np.zeros((9, 2)), "w", sparse=True)
    b, opt = variable(np.zeros(3), name="b"), make()
    opt.initialize([w, b])
    step(opt, rank)
    snapshot = opt.snapshot()
    with monkeypatch.context() as patch:
        if rank == (0 if which == "first" else size - 1):
            patch.setattr(*PLACES[place], interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(opt, rank)
        else:
            # At the latest the second one waits for the other rank.
            error = [raised(step, opt, rank) for _ in range(2)][-1]
            assert isinstance(error, (DisagreementError, hpc.WaitTimeoutError)), error
    go_back(opt, snapshot)
    assert opt.global_step == 1
    for _ in range(2):
        step(opt, rank)

    expected = np.repeat([size - n for n in range(size)], 2).reshape(size, 2) / size
    np.testing.assert_allclose(w.value[:size], -3 * expected)
    np.testing.assert_allclose(b.value, -3 * (size + 1) / 2)


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("place", ["counted", "updated"])
def test_a_rank_without_an_update_is_found(make, rank, size, place, which, monkeypatch):
    w, opt = variable(), make()
    opt.initialize([w])
    snapshot = opt.snapshot()
    with monkeypatch.context() as patch:
        if rank == (0 if which == "first" else size - 1):
            patch.setattr(*PLACES[place], interrupted)
            with pytest.raises(KeyboardInterrupt):
                opt.minimize(gives(1.0))
        else:
            assert opt.minimize(gives(1.0))
    for _ in range(2):
        error = raised(opt.minimize, gives(1.0))
        assert isinstance(error, DisagreementError)
        assert "number of interrupted updates must be the same" in str(error)
    opt.restore(snapshot)
    opt.minimize(gives(1.0))
    np.testing.assert_allclose(w.value, -1)


def test_an_update_that_fails_alike_on_all_ranks_is_no_interruption(make):
    w, opt = variable(), make()
    opt.minimize(gives(1.0), var_list=[w])
    opt.learning_rate = lambda: -1
    assert isinstance(raised(opt.minimize, gives(1.0)), hpc.InvalidArgumentError)
    opt.learning_rate = 1.0
    opt.minimize(gives(1.0))
    np.testing.assert_allclose(w.value, -2)
