"""Sparse variables on a parameter server, against plain formulas on the rows."""

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc
from tests import internals

from ..common import every_pair, same_bits
from ..lazy_rules import MAKERS, LazyRule
from .training import ONE_SIDED, Gate, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size

# Gradients have the first rows only, so that most pulls find all of them in the log.
ROWS, USED, ROW = 200, 40, (2, 3)
CALLS = 5
INVALID = hpc.InvalidArgumentError


@pytest.fixture
def make(make_one):
    kinds = {"sync": hpc.SyncReplicasOptimizer, "stale": hpc.DropStaleGradientOptimizer}
    return lambda kind, *args, **options: make_one(kinds[kind], *args, **options)


def table(dtype="f8", name="w", **options):
    value = np.zeros((ROWS, *ROW), dtype)
    return hpc.Variable(value, name, **{"sparse": True, **options})


def drawn(rank, call, dtype="f8"):
    """Return the gradient of a rank: some are empty, others repeat rows."""
    rng = np.random.default_rng([rank, call])
    number = 0 if (rank + call) % 4 == 1 else 12
    values = rng.integers(-8, 8, (number, *ROW)).astype(dtype)
    return hpc.IndexedSlices(values, rng.integers(0, USED, number))


def mean_of(slices, weights=None):
    """Return indices and values of the mean of whole gradients."""
    weights = weights or [1.0] * len(slices)
    values = [w * each.values for w, each in zip(weights, slices, strict=True)]
    indices = np.concatenate([each.indices for each in slices])
    rows, places = np.unique(indices, return_inverse=True)
    total = np.zeros((rows.size, *values[0].shape[1:]))
    np.add.at(total, places, np.concatenate(values))
    return rows, total / sum(weights)


TOLERANCE = {"f2": 0.1, "f4": 1e-4, "f8": 1e-12}


def close(found, expected):
    limit = TOLERANCE[found.dtype.str[1:]]
    np.testing.assert_allclose(found.astype("f8"), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("rule", "dtype"), [*zip(MAKERS, 2 * ["f2", "f4", "f8"], strict=False)]
)
def test_updates_with_the_mean_of_all_ranks(make, rank, size, rule, dtype):
    w, b = table(dtype, capacity=12), variable(np.zeros(3), dtype, "b")
    opt, model, dense = (
        make("sync", MAKERS[rule](), size),
        LazyRule(rule, w.value),
        LazyRule(rule, b.value),
    )
    for call in range(CALLS):
        loss = gives(np.full(3, 2.0, dtype), drawn(rank, call, dtype))
        weights = [1.0 + call * r for r in range(size)]
        assert opt.minimize(loss, var_list=[b, w], weight=weights[rank])
        model.update(*mean_of([drawn(r, call) for r in range(size)], weights))
        dense.update(range(3), np.full(3, 2.0))
        close(w.value, model.value)
        close(b.value, dense.value)
        assert len(set(meet(w.value.tobytes()))) == 1
    if rank == 0:
        for name, slot in model.slots().items():
            if dtype != "f2":
                found = opt.get_slot(w, name).value
                np.testing.assert_allclose(found, slot, 1e-4, 1e-9)
            assert opt.get_slot(w, name).shape == w.shape


@pytest.mark.parametrize(("rule", "staleness"), every_pair(["SGD", "Adam"], [1, 100]))
def test_updates_with_each_gradient_in_time(make, rank, rule, staleness):
    w, model = table(capacity=12), LazyRule(rule, np.zeros((ROWS, *ROW)))
    lateness = "inverse" if staleness == 100 else None
    opt = make("stale", MAKERS[rule](), staleness, lateness=lateness)
    receipts = [opt.minimize(gives(drawn(rank, c)), var_list=[w]) for c in range(CALLS)]
    receipts = meet(receipts)
    center = opt.center(w)
    opt.free()

    admitted = sorted(
        (receipt.global_step, r, call)
        for r, of_rank in enumerate(receipts)
        for call, receipt in enumerate(of_rank)
        if receipt
    )
    assert [step for step, _, _ in admitted] == list(range(opt.global_step))
    for _, r, call in admitted:
        slices = drawn(r, call)
        model.update(slices.indices, slices.values * receipts[r][call].factor)
    close(center, model.value)
    same_bits(w.value, center)
    accepted = [sum(map(bool, of_rank)) for of_rank in receipts]
    assert list(opt.statistics().accepted) == accepted


@pytest.mark.parametrize(("rule", "kind"), [("SGD", "stale"), ("Adagrad", "sync")])
def test_bits_are_those_of_whole_gradients(make, rank, size, rule, kind):
    w, v = table("f4"), table("f4", "v", sparse=False)
    opt = make(kind, MAKERS[rule](), size if kind == "sync" else 10**6)
    for call in range(CALLS):
        rng = np.random.default_rng([rank, call])
        values = rng.normal(size=(9, *ROW)).astype("f4")
        slices = hpc.IndexedSlices(values, rng.integers(0, USED, 9))
        assert opt.minimize(gives(slices, slices), var_list=[w, v])
        same_bits(w.value, v.value)
    assert w.value.any()


def test_a_mean_is_over_the_gradients_that_are_present(make, rank, size):
    def has(rank, call):
        """Whether a rank has a gradient of w; it changes in both buffers of a rank."""
        return (rank + call // 2) % 2 == 0

    w, v, opt = table(), table(name="v"), make("sync", hpc.SGD(0.5), size)
    some, all_ranks = LazyRule("SGD", w.value), LazyRule("SGD", v.value)
    for call in range(6):
        grad = drawn(rank, call) if has(rank, call) else None
        opt.minimize(gives(grad, drawn(rank, call + 9)), var_list=[w, v])
        if present := [drawn(r, call) for r in range(size) if has(r, call)]:
            some.update(*mean_of(present))
        all_ranks.update(*mean_of([drawn(r, call + 9) for r in range(size)]))
        close(w.value, some.value)
        close(v.value, all_ranks.value)


def test_steps_count_updates_without_rows_but_not_without_gradients(make, rank, size):
    w, b, v = table(), variable(np.zeros(2), name="b"), table(name="v")
    opt = make("sync", hpc.Adam(0.1), size)
    nothing, ones = hpc.IndexedSlices(np.ones((0, *ROW)), []), np.ones(2)
    for grads in (
        (nothing, None, None),
        (nothing, ones, None),
        (nothing, None, nothing),
    ):
        opt.minimize(gives(*grads), var_list=[w, b, v])

    assert opt.global_step == 3
    if rank == 0:
        state = opt.snapshot()["state"]
        assert [state[name]["step"] for name in "wbv"] == [3, 1, 1]
    assert not w.value.any()
    assert b.value.all()


def test_several_gradients_of_a_rank_in_one_update(make, rank, size):
    w, model = table(capacity=12), LazyRule("Adam", np.zeros((ROWS, *ROW)))
    opt = make("sync", MAKERS["Adam"](), 2 * size)
    for step in range(3):
        for call in (2 * step, 2 * step + 1):
            assert opt.minimize(gives(drawn(rank, call)), var_list=[w])
        calls = [drawn(r, c) for r in range(size) for c in (2 * step, 2 * step + 1)]
        model.update(*mean_of(calls))
        close(w.value, model.value)
    assert opt.global_step == 3


@pytest.mark.ranks(min=2)
def test_too_many_rows_in_one_update_are_refused(make, rank, size):
    w, opt = table(capacity=3), make("sync", hpc.SGD(1.0), size)
    opt.initialize([w])

    def slices(first):
        return hpc.IndexedSlices(np.ones((3, *ROW)), range(first, first + 3))

    if rank == 0:
        # Interrupted when it has been accepted.
        with (
            internals.fail_when_accepted(opt, KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            opt.apply_gradients([(slices(0), w)])
        text = "gradients of 'w': the gradients of a rank in one round have at most"
        with pytest.raises(INVALID, match=f"{text} 3 .* rank 0 would have 4"):
            opt.apply_gradients([(slices(1), w)])
    meet()
    if rank:
        opt.minimize(gives(slices(0)))
    meet()
    opt.free()

    assert opt.global_step == 1
    assert (-w.value[:4, 0, 0]).tolist() == [1, 1, 1, 0]
    assert list(opt.statistics().accepted) == [1] * size


@pytest.mark.parametrize(
    ("kind", "shape"), every_pair(["sync", "stale"], [(0, 3), (3, 0), (4,)])
)
def test_tables_without_elements_and_vectors(make, rank, size, kind, shape):
    w = hpc.Variable(np.zeros(shape, "f4"), "w", sparse=True)
    opt = make(kind, hpc.Adagrad(1.0), size if kind == "sync" else 99)
    rows = [2, 0, 2][: 3 * bool(shape[0])]
    values = np.ones((len(rows), *shape[1:]), "f4")
    for _ in range(2):
        assert opt.minimize(gives(hpc.IndexedSlices(values, rows)), var_list=[w])
    opt.free()

    assert opt.global_step == 2 * (1 if kind == "sync" else size)
    same_bits(w.value, opt.center(w))
    if w.value.size:
        assert (w.value < 0).tolist() == [True, False, True, False]


def test_only_rows_that_changed_are_copied(make, rank, size, copies):
    w = hpc.Variable(np.zeros((20_000, 4), "f4"), "w", sparse=True, capacity=3)
    opt = started(make("sync", hpc.Adam(0.1), size), [w])
    loss = gives(hpc.IndexedSlices(np.ones((3, 4), "f4"), [0, 5, 9 + rank]))
    counted = []
    for _ in range(4):
        meet()
        copies.clear()
        opt.minimize(loss)
        meet()
        counted.append(list(copies))

    # To this rank's variable, and on the root to what is published.
    assert counted == [[2 + size] * (1 + (rank == 0))] * 4
    assert np.count_nonzero(w.value.any(axis=1)) == 2 + size
    # Of two buffers with 3 rows each.
    assert internals.gradient_bytes(opt) < 1000


@pytest.mark.ranks(min=2)
def test_reads_of_the_center_do_not_make_pulls_longer(make, rank, copies):
    w, opt = table(), make("stale", hpc.SGD(1.0), 10**6)
    opt.initialize([w])
    slices = hpc.IndexedSlices(np.ones((2, *ROW)), [3, 5])
    if rank == 0:
        opt.minimize(gives(slices))
    meet()
    copies.clear()
    same_bits(opt.center(w)[:, 0, 0], -np.bincount([3, 5], minlength=ROWS) * 1.0)
    opt.compute_gradients(gives(slices))

    assert copies == ["all", 2] if rank else ["all"]


@pytest.mark.ranks(min=2)
def test_no_rank_sees_half_an_update(make, comm, rank, size):
    half = 16
    w = hpc.Variable(np.zeros((2 * half, 5000), "f4"), "w", sparse=True, capacity=2)
    opt = started(make("stale", hpc.SGD(1.0), 10**6), [w])
    nothing = gives(hpc.IndexedSlices(np.ones((0, 5000), "f4"), []))
    meet()
    if rank == size - 1:
        seen = set()
        while len(seen) < 100:
            opt.center(w)
            opt.compute_gradients(nothing)
            assert (w.value == w.value[:, :1]).all()
            same_bits(w.value[:half], w.value[half:])
            assert -w.value[:half, 0].sum() == internals.own_step(opt)
            seen.add(internals.own_step(opt))
        enough = [comm.isend(None, other) for other in range(rank)]
        MPI.Request.waitall(enough)
    else:
        rng = np.random.default_rng(rank)
        while not comm.iprobe(size - 1):
            row = rng.integers(half)
            ones = hpc.IndexedSlices(np.ones((2, 5000), "f4"), [row + half, row])
            assert opt.minimize(gives(ones), var_list=[w])
        comm.recv(source=size - 1)


def test_an_interrupted_pull_is_repeated_as_a_whole(make, size):
    w, opt = table(), make("sync", hpc.SGD(1.0), size)
    opt.minimize(gives(drawn(0, 2)), var_list=[w])
    expected = LazyRule("SGD", np.zeros((ROWS, *ROW)))
    for call in (2, 3):
        expected.update(*mean_of([drawn(0, call)]))

    with internals.interrupt_pulls("w"), pytest.raises(KeyboardInterrupt):
        opt.minimize(gives(drawn(0, 3)), var_list=[w])
    opt.compute_gradients(gives(drawn(0, 3)))
    close(w.value, 2 * expected.value)


@pytest.mark.parametrize("kind", ["sync", "stale"])
def test_gradients_may_lie_on_a_device(make, size, cp, kind):
    w, opt = table(), make(kind, hpc.SGD(1.0), size if kind == "sync" else 99)
    slices = hpc.IndexedSlices(cp.ones((3, *ROW)), cp.asarray([4, 1, 4]))
    assert opt.minimize(gives(slices), var_list=[w])
    opt.free()

    total = 1 if kind == "sync" else size
    assert (-w.value[:5, 0, 0]).tolist() == [0, total, 0, 0, 2 * total]


WRONG = {
    "array": (
        np.zeros((ROWS, *ROW)),
        TypeError,
        "gradient of 'w', which is sparse, must be an IndexedSlices",
    ),
    "row": (
        hpc.IndexedSlices(np.ones((1, *ROW)), [ROWS]),
        INVALID,
        f"gradient of 'w': indices must be in 0 to {ROWS - 1}, got {ROWS}",
    ),
    "many": (
        hpc.IndexedSlices(np.ones((9, *ROW)), [*range(8), 0]),
        INVALID,
        "gradient of 'w' has 8 different rows, at most 7 can be sent",
    ),
}


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_wrong_gradient_changes_nothing(comm, rank, size, kind):
    w, b = table(capacity=7), variable(0.0, name="b")
    fits = hpc.IndexedSlices(np.ones((9, *ROW)), [*range(7), 0, 1])
    with started(ONE_SIDED[kind](hpc.SGD(1.0), [w, b], comm), [w, b]) as opt:
        opt.minimize(gives(fits, 1.0))
        before = w.value.copy(), b.value.copy()
        for wrong, error, text in WRONG.values() if rank == size - 1 else ():
            with pytest.raises(error, match=text):
                opt.minimize(gives(wrong, 1.0))
            if kind != "DropStale":
                same_bits(w.value, before[0])
                same_bits(b.value, before[1])
        opt.minimize(gives(fits, 1.0))

    # AGN pushes a mean of two.
    total = {"SyncReplicas": 2, "DropStale": 2 * size, "AGN": size}[kind]
    assert -w.value[0, 0, 0] == 2 * total
    assert -w.value.sum() == 9 * 6 * total
    assert -b.value == total


def test_a_rule_of_the_user_is_refused(make, rank):
    for kind in ("sync", "stale"):
        w, opt = table(), make(kind, Gate(lambda: None), 1)
        with pytest.raises(INVALID, match="'w' needs an inner optimizer that is a"):
            opt.initialize([w])
        assert "initialize" in str(raised(opt.statistics))


@pytest.mark.ranks(min=2)
def test_ranks_must_agree_on_capacities(make, rank):
    w, opt = table(capacity=3 + (rank == 1)), make("stale", hpc.SGD(1.0), 1)
    with pytest.raises(hpc.DisagreementError, match="capacities of sparse variables"):
        opt.initialize([w])
