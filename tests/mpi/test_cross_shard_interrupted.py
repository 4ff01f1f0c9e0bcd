"""CrossShardOptimizer: a call of one rank is interrupted, and all ranks go back."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError
from hpcaccum.optimizers import reducing, start
from hpcaccum.optimizers.shard_reducer import ShardReducer
from hpcaccum.reducer import Reducer, RowExchange, row_exchange

from ..common import VAIN
from .interrupting import at_each_point, interrupt
from .support import meet
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


def step_of(opt, rank, scale):
    """Make a step of which each sum of the gradients of some ranks is different."""
    value = scale * 4.0**rank
    rows = hpc.IndexedSlices(np.full((1, 2), value), [0])
    return opt.minimize(gives(rows, np.full(3, value)))


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


@pytest.mark.parametrize("which", ["first", "last"])
def test_others_still_read_the_rows_of_an_interrupted_step(
    make, rank, size, which, monkeypatch
):
    w = hpc.Variable(np.zeros((9, 2)), "w", sparse=True)
    b, opt = variable(np.zeros(3), name="b"), make(hpc.Reduction.SUM)
    opt.initialize([w, b])
    shard = opt._shard
    if shard._rows._capacity < 0 or not row_exchange._MOST_BYTES:
        pytest.skip("rows are sent")
    exchange, collect = shard.reducer._device.finish, shard._rows.collect
    if rank == (0 if which == "first" else size - 1):
        monkeypatch.setattr(
            shard.reducer._device, "finish", lambda call: interrupted(exchange(call))
        )
        with pytest.raises(KeyboardInterrupt):
            step_of(opt, rank, 1)
        assert isinstance(raised(step_of, opt, rank, 64), hpc.WaitTimeoutError)
        meet()
    else:
        monkeypatch.setattr(
            shard._rows, "collect", lambda *given: [meet(), collect(*given)][1]
        )
        step_of(opt, rank, 1)
        assert (w.value[0] == -sum(4**r for r in range(size))).all()


@pytest.mark.parametrize("which", ["first", "last"])
def test_ranks_are_alike_wherever_one_is_interrupted(
    make, rank, size, which, monkeypatch
):
    monkeypatch.setattr("hpcaccum.mpi.control._PATIENCE", 0.03)
    w = hpc.Variable(np.zeros((9, 2)), "w", sparse=True)
    b, opt = variable(np.zeros(3), name="b"), make(hpc.Reduction.SUM)
    opt.initialize([w, b])
    snapshot, all_ranks = opt.snapshot(), sum(4**r for r in range(size))
    one = 0 if which == "first" else size - 1
    mixed = all_ranks + 63 * 4**one  # if the first call of this rank was not begun

    def trial(number):
        more = None
        if rank == one:
            more = interrupt(lambda: step_of(opt, rank, 1), number)
        else:
            raised(step_of, opt, rank, 1)
        error = raised(step_of, opt, rank, 64)
        found = w.value[0, 0], b.value[0], isinstance(error, Exception)
        go_back(opt, snapshot)
        ranks, mores = zip(*meet((found, more)), strict=True)
        if not ranks[one][2]:
            assert len({each[:2] for each in ranks}) == 1, ranks
        for each in [each for r, each in enumerate(ranks) if r != one]:
            assert each[0] == each[1], ranks
            assert -each[0] in [n * all_ranks for n in (0, 1, 64, 65)] + [mixed], ranks
        step_of(opt, rank, 1)
        assert (w.value[0, 0], b.value[0]) == (-all_ranks, -all_ranks)
        go_back(opt, snapshot)
        return mores[one], None

    at_each_point(trial, 25)


def test_an_interrupted_restore_is_not_mixed_with_the_next(
    make, rank, size, monkeypatch
):
    w, opt = variable(), make()
    opt.initialize([w])
    first = opt.snapshot()
    opt.minimize(gives(1.0))
    second = opt.snapshot()
    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setattr(reducing, "broadcast", interrupted)
            with pytest.raises(KeyboardInterrupt):
                opt.restore(first)
    # The first rank has sent its values, which the last one has not received.
    assert isinstance(raised(opt.restore, first), DisagreementError)
    error = raised(opt.restore, second)
    assert isinstance(error, DisagreementError)
    assert "number of broadcasts must be the same" in str(error)
    assert "number of broadcasts" in str(raised(make().initialize, [variable()]))
    if rank == size - 1:
        # Before the communicator can be freed.
        start.broadcast(opt._group, [variable()], "the missing one")


def test_a_loss_writes_to_no_array_that_others_may_still_read(make, rank, monkeypatch):
    var, opt, calls = variable(np.zeros(3)), make(), []
    opt.initialize([var])
    snapshot = opt.snapshot()

    def loss():
        calls.append(rank)
        return 0.0, [opt.gradient_arrays()[var.name]]

    if rank == 0:
        with monkeypatch.context() as patch:
            patch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
            errors = [raised(opt.minimize, loss) for _ in range(2)]
        assert {type(error) for error in errors} == {hpc.WaitTimeoutError}
        assert "reduction 1 was interrupted" in str(errors[1])
        assert calls == [0]
    meet()
    go_back(opt, snapshot)
    opt.minimize(loss)
    opt.free()
