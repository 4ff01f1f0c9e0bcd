"""After an exception on one rank, reducers give errors and no wrong sum."""

from unittest.mock import Mock

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import BrokenObjectError, DisagreementError
from hpcaccum.optimizers import cross_shard, start
from hpcaccum.optimizers.shard_reducer import ShardReducer
from hpcaccum.reducer import Reducer
from hpcaccum.reducer.device import DeviceCalls
from hpcaccum.reducer.inputs import Inputs
from hpcaccum.reducer.schedule import Schedule
from hpcaccum.rows import RowExchange
from hpcaccum.rows import exchange as row_exchange

from ..common import every_pair
from .acting import interrupted, meet
from .expiring import times_out_without
from .reducing import ALL, KINDS, ONES, SHAPES, works
from .training import cross_shard_fixture, gives, raised, variable  # noqa: F401

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_size, pytest.mark.own_comm]
pytestmark += [pytest.mark.usefixtures("impatient")]

# Where a step ends: before, in and after the exchange.
STEPS = {
    "begun": (Reducer, "_finish"),
    "reduced": (ShardReducer, "_collect"),
    "rows sent": (RowExchange, "_gather"),
    "rows read": (row_exchange, "merged"),
    "counted": (ShardReducer, "count"),
    "updated": (hpc.SGD, "apply_gradients"),
}


@pytest.fixture
def odd(request, size):
    return 0 if request.param == "first" else size - 1


def ended(monkeypatch, place, call, *args):
    with monkeypatch.context() as patch:
        patch.setattr(*place, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            call(*args)


@pytest.mark.parametrize(
    ("maker", "place", "odd"),
    every_pair(
        KINDS,
        [(Inputs, "check"), (DeviceCalls, "finish"), "the wait"],
        ["first", "last"],
    ),
    ids=str,
    indirect=["maker", "odd"],
)
def test_a_reducer_is_broken(maker, rank, size, odd, place, monkeypatch):
    reducer = maker(SHAPES)
    works(reducer, size)
    if rank == odd and place == "the wait":
        interrupted(reducer.reduce, ONES)
    elif rank == odd:
        ended(monkeypatch, place, reducer.reduce, ONES)
    meet()
    if rank == odd:
        assert type(raised(reducer.reduce, ONES)) is BrokenObjectError
        assert type(raised(reducer.start, "x")) is BrokenObjectError
        error = raised(maker.group.allgather, 0, "another call")
    elif not isinstance(error := raised(reducer.reduce, ONES), Exception):
        assert place == "the wait"
        assert all((array == 1).all() for array in error.values())
        error = raised(reducer.reduce, ONES)
    assert type(meet(error)[rank]) is DisagreementError
    works(maker(SHAPES), size)


@ALL
def test_a_start_that_ends_breaks_the_reducer(maker, rank, monkeypatch):
    reducer = maker(SHAPES)
    if rank == 0:
        ended(monkeypatch, (Schedule, "add"), reducer.start, "x", ONES["x"])
        assert type(raised(reducer.wait)) is BrokenObjectError


def step(opt, rank):
    rows = hpc.IndexedSlices(np.ones((rank + 1, 2)), np.arange(rank + 1))
    return opt.minimize(gives(rows, np.full(3, rank + 1.0)))


def go_back(opt, snapshot):
    """Restore a snapshot, when all ranks do."""
    while isinstance(error := raised(opt.restore, snapshot), DisagreementError):
        """Another rank waits in a step, and gets the same error."""
    assert error is None, error


# Rows are in messages, or in memory that the ranks share.
@pytest.mark.parametrize(
    ("place", "most", "odd"),
    [
        case
        for case in every_pair([*STEPS, "late"], [0, 1 << 19], ["first", "last"])
        if case[:2] != ("rows sent", 1 << 19)
    ],
    indirect=["odd"],
)
def test_all_go_on_after_restore(comm, make, rank, size, most, odd, place, monkeypatch):
    monkeypatch.setattr(row_exchange, "_MOST_BYTES", most)
    w = hpc.Variable(np.zeros((9, 2)), "w", sparse=True)
    b, opt, broken = variable(np.zeros(3), name="b"), make(), rank == odd
    opt.initialize([w, b])
    step(opt, rank)
    snapshot = opt.snapshot()
    if place == "late":
        broken = not broken
        with times_out_without(comm, odd):
            error = raised(step, opt, rank) if broken else None
        assert isinstance(error, hpc.WaitTimeoutError) == broken
        meet()
    elif broken:
        ended(monkeypatch, STEPS[place], step, opt, rank)
    if broken:
        errors = raised(step, opt, rank), raised(opt.leave)
        assert {type(error) for error in errors} == {BrokenObjectError}
    elif place != "late":
        error = [raised(step, opt, rank) for _ in range(2)][-1]
        assert isinstance(error, (DisagreementError, BrokenObjectError)), error
    go_back(opt, snapshot)
    assert opt.global_step == 1
    for _ in range(2):
        step(opt, rank)

    expected = -3 * np.arange(size, 0, -1) / size
    np.testing.assert_allclose(w.value[:size].T, [expected, expected])
    np.testing.assert_allclose(b.value, -3 * (size + 1) / 2)


def test_a_restore_that_ends_is_not_mixed_with_the_next(make, rank, size, monkeypatch):
    opt, other = make(), make()
    opt.minimize(gives(1.0), var_list=[variable()])
    first = opt.snapshot()
    if rank == size - 1:
        ended(monkeypatch, (cross_shard, "broadcast"), opt.restore, first)
    # The first rank has sent its values, the last one has not received them.
    errors = [raised(opt.restore, first) for _ in range(2)]
    errors.append(raised(other.initialize, [variable()]))
    assert all(type(error) is DisagreementError for error in errors)
    assert "number of broadcasts must be the same" in str(errors[1])
    if rank == size - 1:
        # Before the communicator can be freed.
        start.broadcast(opt._group, [variable()], "the missing one")
