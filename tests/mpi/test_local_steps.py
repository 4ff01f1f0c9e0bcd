"""LocalStepsOptimizer: pushes of differences; test_fragments has the figures."""

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from ..common import same_bits
from .training import check_error, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError


@pytest.fixture
def make(make_one):
    kind, sgd = hpc.LocalStepsOptimizer, lambda: hpc.SGD(1)
    return lambda period, inner=None, outer=None, **options: make_one(
        kind, inner or sgd(), outer or sgd(), period, **options
    )


def drawn(rank, call):
    return np.random.default_rng([rank, call]).integers(-8, 9, 5).astype("f8")


def test_with_a_period_of_one_it_is_cross_shard(make, comm, rank, size):
    x, y = variable(np.ones(5)), variable(np.ones(5))
    opt = make(1, outer=hpc.Momentum(0.25, 0.5), quorum=size)
    with hpc.CrossShardOptimizer(hpc.Momentum(0.25, 0.5), comm=comm) as other:
        for call in range(4):
            loss = gives(drawn(rank, call))
            opt.minimize(loss, var_list=[x])
            other.minimize(loss, var_list=[y])
            if call == 0:
                # x and the gradient are whole numbers, so their difference is exact.
                same_bits(x.value, y.value)
            np.testing.assert_allclose(x.value, y.value, rtol=1e-14, atol=1e-14)


def test_with_an_outer_rate_of_one_it_averages(make, comm, rank, size):
    x, opt = variable(np.ones(5)), make(3, hpc.Adam(0.1), quorum=size)
    alone, adam = variable(np.ones(5)), hpc.Adam(0.1)
    for call in range(9):
        grad = drawn(rank, call)
        opt.minimize(gives(grad), var_list=[x])
        adam.apply_gradients([(grad, alone)])
        if call % 3 == 2:
            alone.value[...] = np.mean(meet(alone.value.copy()), axis=0)
            np.testing.assert_allclose(x.value, alone.value, rtol=1e-12)
    # The state of the local steps stays on its rank.
    found, expected = opt.get_slot(x, "m").value, adam.get_slot(alone, "m").value
    same_bits(found, expected)


@pytest.mark.ranks(min=2)
def test_a_quorum_does_not_wait_for_others(make, rank, size):
    x, opt = variable(), make(2, quorum=size - 1)
    opt.initialize([x])
    late = rank == size - 1
    if late:
        opt.minimize(gives(64.0))
    meet()
    if not late:
        assert [opt.minimize(gives(1.0)).sent for _ in range(4)] == [0, 1, 0, 1]
    meet()
    if late:
        receipt = opt.minimize(gives(64.0))
        assert receipt == hpc.Receipt(False, 0, 2)
        # Its local steps are lost, and it goes on with the newest center.
        assert x.value == -4
        assert not opt.minimize(gives(1.0)).sent
        assert x.value == -5
    meet()
    assert opt.center(x) == -4
    assert opt.statistics().dropped == (*[0] * (size - 1), 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_differences_are_pushed_from_where_they_are_formed(make, rank, size, dtype):
    x, opt, copied = variable(np.zeros(3), dtype), make(2, quorum=size), []
    with internals.note_copies(copied):
        for _ in range(4):
            opt.minimize(gives(np.ones(3, dtype)), var_list=[x])
    assert copied == []
    assert x.value.tolist() == [-4] * 3


def test_gradients_of_rows_make_local_steps(make, size):
    x, opt = variable(np.zeros((4, 2))), make(2, quorum=size)
    for row in (1, 3):
        grad = hpc.IndexedSlices(np.ones((1, 2)), [row])
        opt.minimize(gives(grad), var_list=[x])
    assert x.value[:, 0].tolist() == [0, -1, 0, -1]


def test_a_snapshot_has_the_state_of_the_outer_rule(make, rank, size):
    x, outer = variable(np.ones(5)), hpc.Momentum(0.5, 0.5)
    opt = make(2, hpc.Adam(0.1), outer, quorum=size)
    for call in range(4):
        opt.minimize(gives(drawn(rank, call)), var_list=[x])
    saved = opt.snapshot() if rank == 0 else None
    if rank == 0:
        assert saved["global_step"] == 2
        assert set(saved["state"]["w"]) == {"momentum", "step"}
        same_bits(saved["state"]["w"]["momentum"], opt.get_slot(x, "momentum").value)
    # That of the local steps stays on its rank.
    assert opt.get_slot(x, "m").value.any()
    centers = []
    for _ in range(2):
        opt.restore(saved)
        for call in range(2):
            opt.minimize(gives(drawn(rank, call)))
        centers.append(opt.center(x))
        meet()
    # The local steps begin anew, too.
    same_bits(*centers)


@pytest.mark.ranks(min=2)
def test_a_dedicated_server(comm, rank, size):
    x, rules = variable(), (hpc.SGD(1), hpc.SGD(1))
    opt = hpc.LocalStepsOptimizer(*rules, 2, quorum=size - 1, comm=comm, dedicated=True)
    opt.initialize([x])
    if rank == 0:
        opt.serve()
    else:
        for _ in range(4):
            opt.minimize(gives(1.0))
        opt.leave()
    opt.free()
    assert x.value == -4
    assert opt.global_step == 2


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"period": 0}, INVALID, "period must be at least 1"),
        ({"outer": None}, TypeError, "must be an Optimizer, got NoneType"),
        ({"quorum": 0}, INVALID, "quorum must be at least 1"),
        ({"quorum": 99}, INVALID, "quorum must be at most"),
        ({"quorum": 1, "staleness": 1}, INVALID, "without a quorum"),
        ({"quorum": 1, "lateness": "inverse"}, INVALID, "without a quorum"),
        ({"staleness": 1.0}, TypeError, "staleness must be an integer"),
        ({"lateness": 1}, INVALID, "lateness must be None"),
        ({"fragments": 0}, INVALID, "fragments must be at least 1"),
        ({"fragments": 3}, INVALID, "must be at most the period"),
        ({"overlap": -1}, INVALID, "overlap must be at least 0 and less"),
        ({"overlap": 2}, INVALID, "less than the period, which is 2"),
    ],
)
def test_arguments_are_checked_on_all_ranks(comm, rank, size, wrong, kind, text):
    right = {"inner": hpc.SGD(1), "outer": hpc.SGD(1), "period": 2}
    mine = {**right, **wrong} if rank == size - 1 else right
    check_error(raised(hpc.LocalStepsOptimizer, comm=comm, **mine), text, kind=kind)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "other", [{"outer": hpc.SGD(2)}, {"fragments": 2}, {"overlap": 1}]
)
def test_ranks_must_agree(comm, rank, size, other):
    mine = {"outer": hpc.SGD(1)} | (other if rank == size - 1 else {})
    error = raised(hpc.LocalStepsOptimizer, hpc.SGD(1), period=4, comm=comm, **mine)

    assert type(error) is hpc.DisagreementError
    assert f"{next(iter(other))} must be the same on all" in str(error)


def test_sparse_variables_are_refused(make):
    sparse = hpc.Variable(np.zeros((4, 2)), "w", sparse=True)
    error = raised(make(2).initialize, [sparse])
    assert "needs an optimizer that pushes gradients" in str(error)


def test_it_shows_its_options(make):
    opt = started(make(2, outer=hpc.SGD(0.5), staleness=3, name="mine"), [variable()])
    shown = repr(opt)
    assert shown.startswith("LocalStepsOptimizer(SGD(learning_rate=1.0, ")
    assert "outer=SGD(learning_rate=0.5, name='SGD'), period=2, staleness=3, " in shown
    assert "fragments=1, overlap=0, servers=" in shown
    assert "fragments=2, overlap=1" in repr(make(4, fragments=2, overlap=1))
