"""LocalStepsOptimizer: local steps, pushes of differences, an outer rule."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, testing

from ..common import same_bits
from .training import computed, gives, meet, raised, turns, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def make(comm, keep):
    """Return a function that makes an optimizer."""

    def make(period, inner=None, outer=None, **options):
        inner, outer = inner or hpc.SGD(1), outer or hpc.SGD(1)
        return keep(hpc.LocalStepsOptimizer(inner, outer, period, comm=comm, **options))

    return make


def drawn(rank, call):
    """Return a gradient, of whole numbers."""
    return np.random.default_rng([rank, call]).integers(-8, 9, 5).astype("f8")


# Figures


def test_one_rank_by_hand(make, size):
    x, opt = variable(), make(3, outer=hpc.SGD(0.5))
    opt.initialize([x])

    def act(turn):
        receipt = opt.minimize(gives(turn + 1.0))
        return float(x.value), float(opt.center(x)), receipt.sent, opt.global_step

    columns = zip(*turns([size - 1] * 7, act), strict=True)

    assert [list(column) for column in columns] == [
        [-1, -3, -3, -7, -12, -10.5, -17.5],
        [0, 0, -3, -3, -3, -10.5, -10.5],
        [False, False, True, False, False, True, False],
        [0, 0, 1, 1, 1, 2, 2],
    ]


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


@pytest.mark.ranks(min=2)
def test_pushes_that_are_late_are_discounted_or_dropped(make, rank, size):
    x, opt = variable(), make(1, staleness=1, lateness="inverse")
    opt.initialize([x])
    pairs = computed(opt, 8.0)
    receipts = turns([0, 0, size - 1], lambda _: opt.apply_gradients(pairs))
    late = receipts[-1]

    # Rank 0 has pulled after its first push.
    assert [r.factor for r in receipts[:2]] == [1, 1]
    assert (late.accepted, late.lag) == (False, 2)
    assert opt.center(x) == -16
    meet()
    receipts = turns([0, size - 1, 0], lambda _: opt.minimize(gives(8.0)))
    # So has the last one after it was dropped, and rank 0 after each push.
    assert [(r.lag, r.factor) for r in receipts] == [(0, 1), (1, 0.5), (1, 0.5)]
    assert opt.center(x) == -16 - 8 - 4 - 4


def test_the_center_is_led_to_the_mean_of_the_minima(make, rank, size):
    x, minimum = variable(np.full(3, 5.0)), np.arange(3.0) + rank
    outer = hpc.Momentum(0.7, 0.9, use_nesterov=True)
    opt = make(5, hpc.SGD(0.1), outer, quorum=size)
    for _ in range(300):
        opt.minimize(lambda: (0.0, [x.value - minimum]), var_list=[x])
    mean = np.arange(3.0) + (size - 1) / 2
    np.testing.assert_allclose(opt.center(x), mean, atol=1e-3)


# Variables


def test_a_variable_without_gradients_is_not_pushed(make, rank, size):
    v, w = variable(name="v"), variable(5.0, name="w")
    opt = make(2, quorum=size)
    for call in range(2):
        # Only rank 0 has one of w, in the first call.
        of_w = 1.0 if (rank, call) == (0, 0) else None
        opt.minimize(gives(1.0, of_w), var_list=[v, w])

    assert v.value == -2
    assert w.value == 4


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_differences_are_pushed_from_where_they_are_formed(make, rank, size, dtype):
    x, opt, copied = variable(np.zeros(3), dtype), make(2, quorum=size), []
    with testing.note_copies(copied):
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


# Its life


def test_assign_undoes_local_steps(make, rank, size):
    x, opt = variable(), make(2, quorum=size)
    opt.minimize(gives(1.0), var_list=[x])
    if rank == 0:
        x.value[...] = 10
    opt.assign()
    opt.minimize(gives(1.0))
    assert x.value == 9
    assert opt.global_step == 1


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
    centers = []
    for _ in range(2):
        opt.restore(saved)
        for call in range(2):
            opt.minimize(gives(drawn(rank, call)))
        centers.append(opt.center(x))
        meet()
    # The local steps begin anew, too.
    same_bits(*centers)


def test_local_steps_after_the_last_push_do_not_count(comm, size):
    x = variable()
    with hpc.LocalStepsOptimizer(hpc.SGD(1), hpc.SGD(1), 2, comm=comm) as opt:
        for _ in range(3):
            opt.minimize(gives(1.0), var_list=[x])
    assert x.value == -2 * size


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


# Arguments


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        ({"period": 0}, InvalidArgumentError, "period must be at least 1"),
        ({"outer": None}, TypeError, "must be an Optimizer, got NoneType"),
        ({"quorum": 0}, InvalidArgumentError, "quorum must be at least 1"),
        ({"quorum": 99}, InvalidArgumentError, "quorum must be at most"),
        ({"quorum": 1, "staleness": 1}, InvalidArgumentError, "without a quorum"),
        (
            {"quorum": 1, "lateness": "inverse"},
            InvalidArgumentError,
            "without a quorum",
        ),
        ({"staleness": 1.0}, TypeError, "staleness must be an integer"),
        ({"lateness": 1}, InvalidArgumentError, "lateness must be None"),
        ({"fragments": 0}, InvalidArgumentError, "fragments must be at least 1"),
        ({"fragments": 3}, InvalidArgumentError, "must be at most the period"),
        ({"fragments": 1.0}, TypeError, "fragments must be an integer"),
        ({"overlap": -1}, InvalidArgumentError, "overlap must be at least 0 and less"),
        ({"overlap": 2}, InvalidArgumentError, "less than the period, which is 2"),
        ({"overlap": None}, TypeError, "overlap must be an integer"),
    ],
)
def test_arguments_are_checked_on_all_ranks(comm, rank, size, wrong, kind, text):
    right = {"inner": hpc.SGD(1), "outer": hpc.SGD(1), "period": 2}
    mine = {**right, **wrong} if rank == size - 1 else right
    error = raised(hpc.LocalStepsOptimizer, comm=comm, **mine)

    assert type(error) is kind
    assert text in str(error)


@pytest.mark.ranks(min=2)
def test_ranks_need_the_same_outer_rule(comm, rank, size):
    outer = hpc.SGD(1.0 + (rank == size - 1))
    error = raised(hpc.LocalStepsOptimizer, hpc.SGD(1), outer, 2, comm=comm)

    assert type(error) is hpc.DisagreementError
    assert "outer must be the same on all" in str(error)


def test_sparse_variables_are_refused(make):
    sparse = hpc.Variable(np.zeros((4, 2)), "w", sparse=True)
    error = raised(make(2).initialize, [sparse])
    assert "needs an optimizer that pushes gradients" in str(error)


def test_it_shows_its_options(make):
    opt = make(2, outer=hpc.SGD(0.5), staleness=3, name="mine")
    opt.initialize([variable()])
    shown = repr(opt)
    assert shown.startswith("LocalStepsOptimizer(SGD(learning_rate=1.0, ")
    assert "outer=SGD(learning_rate=0.5, name='SGD'), period=2, staleness=3, " in shown
