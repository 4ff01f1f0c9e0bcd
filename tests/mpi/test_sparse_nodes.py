"""Sparse variables on a server with ranks on several nodes: what agents exchange."""

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from ..common import same_bits
from ..lazy_rules import LazyRule
from .test_sparse_server import mean_of
from .training import ONE_SIDED, gives, meet, started, turns, variable

ROWS, USED = 160, 30
# The rows of a gradient take less, or more, than what an agent sends first.
WIDTHS = [6, 1000]


def table(width, name="w", dtype="f8", rows=ROWS, **options):
    return hpc.Variable(np.zeros((rows, width), dtype), name, sparse=True, **options)


def drawn(rank, call, width):
    """Return the gradient of a rank; sums of such are exact."""
    rng = np.random.default_rng([rank, call])
    number = 0 if (rank + call) % 4 == 1 else 10
    values = rng.integers(-8, 8, (number, width)).astype("f8")
    return hpc.IndexedSlices(values, rng.integers(0, USED, number))


@pytest.mark.parametrize(
    ("kind", "width"), [*zip(["SyncReplicas", "DropStale"], WIDTHS, strict=True)]
)
def test_all_nodes_have_the_results_of_plain_formulas(group, rank, size, kind, width):
    w, v, b = table(width), table(3, "v", "f4"), variable(np.zeros(2), name="b")
    models = LazyRule("Momentum", w.value), LazyRule("Momentum", v.value)
    rule, host = hpc.Momentum(0.5, 0.75), size - 1
    with started(ONE_SIDED[kind](rule, [w, v, b], group, host=host), [w, v, b]) as opt:

        def act(call):
            grads = drawn(rank, call, width), drawn(rank, call + 50, 3), np.ones(2)
            assert opt.minimize(gives(*grads), var_list=[w, v, b])

        for call in range(4):
            if kind == "SyncReplicas":
                act(call)
                rounds = [range(size)]
            else:
                turns(range(size), lambda _, call=call: act(call))
                rounds = [[each] for each in range(size)]
            for ranks in rounds:
                for model, other in zip(models, (0, 50), strict=True):
                    shape = model.value.shape[1]
                    grads = [drawn(each, call + other, shape) for each in ranks]
                    model.update(*mean_of(grads))
            meet()
            center = opt.center([w, v])
            for found, model in zip(center, models, strict=True):
                np.testing.assert_allclose(found, model.value, 1e-5, 1e-5)
            opt.compute_gradients(gives(None, None, None))
            for var, found in zip((w, v), center, strict=True):
                same_bits(var.value, found)
            meet()


def test_messages_have_the_rows_that_changed(group, rank, size):
    w = table(4, rows=20_000, dtype="f4", capacity=3)
    b = variable(np.zeros(5), "f4", "b")
    with (
        ONE_SIDED["SyncReplicas"](hpc.Adam(0.1), [w, b], group) as opt,
        internals.note_row_messages(messages := []),
    ):
        opt.initialize([w, b])
        slices = hpc.IndexedSlices(np.ones((3, 4), "f4"), [0, 5, 9 + rank])
        loss = gives(slices, np.ones(5, "f4"))
        opt.minimize(loss)
        meet()
        messages.clear()
        for _ in range(3):
            opt.minimize(loss)
            meet()

    # The number and the elements of each row, those of b, and some bytes around them.
    nbytes = (2 + size) * (8 + 4 * 4) + 5 * 4
    assert all(nbytes < each < nbytes + 1000 for each in messages)
    assert not messages or len(messages) % 3 == 0
    if rank == 0:
        assert messages


@pytest.fixture(params=[1, ROWS // 40, ROWS * 9])
def log(request):
    """The log is as long as the table, too short for some updates, or has one entry."""
    with internals.limits(rows_of_entry=request.param):
        yield


def test_ranks_may_be_behind_by_any_number_of_updates(group, rank, log):
    w, b = table(6), variable(np.zeros(1), name="b")
    model = LazyRule("SGD", w.value)
    with started(ONE_SIDED["DropStale"](hpc.SGD(0.5), [w, b], group), [w, b]) as opt:
        meet()
        for call in range(12):
            if rank == 0:
                opt.minimize(gives(drawn(0, call, 6), np.ones(1)), var_list=[w, b])
            model.update(*mean_of([drawn(0, call, 6)]))
            meet()
            # Each node at other times, and rarely; its ranks not all of them.
            number = group.node_number
            if call % (2 + 2 * number) == 0 and rank in group.nodes[number][:1]:
                opt.center(w)
            if rank and call in (0, rank, 4 * rank):
                opt.center(w)
                opt.compute_gradients(gives(None, None))
                np.testing.assert_array_equal(w.value, model.value)
            meet()
        found = opt.center(w)
        opt.compute_gradients(gives(None, None))

        np.testing.assert_array_equal(found, model.value)
        np.testing.assert_array_equal(w.value, model.value)
        assert b.value == -6
