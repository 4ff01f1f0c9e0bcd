"""Sparse variables with AGN: against whole gradients, bit for bit, and formulas."""

import itertools

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from ..common import same_bits
from ..lazy_rules import MAKERS, LazyRule
from .test_sparse_server import INVALID, ROW, ROWS, table
from .training import ONE_SIDED, gives, meet, raised, turns, variable

pytestmark = pytest.mark.any_size

OFTEN = 10


@pytest.fixture
def make(make_one):
    return lambda period, own, inner=None: make_one(
        ONE_SIDED["AGN"], inner or hpc.SGD(1.0), own, period=period
    )


def drawn(rank, call, dtype="f8", number=8):
    """Return a gradient whose sums are rounded; half of its rows are of a few ones."""
    rng = np.random.default_rng([rank, call])
    values = rng.normal(size=(number, *ROW)).astype(dtype)
    often = rng.integers(0, OFTEN, number // 2)
    return hpc.IndexedSlices(
        values, [*often, *rng.integers(0, ROWS, number - number // 2)]
    )


def rows(*indices, value=1.0):
    return hpc.IndexedSlices(np.full((len(indices), *ROW), value), indices)


# Which calls have a gradient of the first of two tables: all of them, all but one that
# pushes, one that does not push, and none that pushes for two periods.
GIVEN = {
    "all": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    "not one push": [1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1],
    "not one local step": [1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1],
    "no push for long": [1, 1, 0, 1, 1, 0, 1, 0, 1, 0, 1, 1],
}


@pytest.fixture
def long_log():
    """The log is long enough for most pulls."""
    with internals.limits(rows_of_entry=1):
        yield


# A dtype does not change which rows there are, nor a rule.
@pytest.mark.parametrize(
    ("given", "rule", "dtypes"),
    [
        ("all", "SGD", "f2 f2"),
        ("all", "Adagrad", "f4 f4"),
        ("not one push", "Adagrad", "f8 f8"),
        ("not one local step", "SGD", "f4 f8"),
        ("no push for long", "Adagrad", "f2 f2"),
        ("no push for long", "SGD", "f4 f8"),
    ],
)
def test_bits_are_those_of_whole_gradients(make, rank, rule, dtypes, given, long_log):
    dtype, wider = dtypes.split()
    # Six gradients of the table have fewer different rows, but more in all.
    w, x = table(dtype, capacity=12), table(dtype, "x", sparse=False)
    u, y = table(dtype, "u"), table(dtype, "y", sparse=False)
    b = variable(np.zeros(3), wider, "b")
    opt = make(3, [w, x, u, y, b], MAKERS[rule]())
    for call, there in enumerate(GIVEN[given]):
        one, two = drawn(rank, call, dtype), drawn(rank, call + 50, dtype, 5 * there)
        grads = [one, one] if there else [None, None]
        # Other ranks push meanwhile: both tables must get the same updates of theirs.
        opt.minimize(gives(*grads, two, two, np.ones(3)))
        same_bits(w.value, x.value)
        same_bits(u.value, y.value)
    meet()
    centers = opt.center([w, x, u, y])
    same_bits(*centers[:2])
    same_bits(*centers[2:])
    assert centers[0].any()
    opt.free()
    same_bits(w.value, x.value)
    same_bits(w.value, opt.center(w))


@pytest.mark.parametrize("rule", MAKERS)
def test_local_steps_and_pushes_are_those_of_the_formulas(make, rank, size, rule):
    w, period = table(capacity=8), 2
    opt = make(period, [w], MAKERS[rule]())
    opt.initialize()
    center = LazyRule(rule, w.value)
    local = [LazyRule(rule, w.value) for _ in range(size)]
    order = [*range(size), *reversed(range(size)), *range(size)]
    call = itertools.count()

    def act(_):
        found = []
        for _ in range(period):
            receipt = opt.minimize(gives(drawn(rank, next(call))))
            found.append((receipt.sent, w.value.copy()))
        return found

    results = turns(order, act)
    for turn, each in enumerate(order):
        first = period * order[:turn].count(each)
        slices = [drawn(each, first + i) for i in range(period)]
        for i, grad in enumerate(slices):
            local[each].update(grad.indices, grad.values)
            if i + 1 == period:
                center.update(
                    np.concatenate([each.indices for each in slices]),
                    np.concatenate([each.values for each in slices]) / period,
                )
                local[each].value[...] = center.value
            sent, value = results[turn][i]
            assert sent == (i + 1 == period)
            np.testing.assert_allclose(value, local[each].value, 1e-9, 1e-12)
    np.testing.assert_allclose(opt.center(w), center.value, 1e-9, 1e-12)


def test_arrays_of_a_gradient_may_be_written_afterwards(make, rank, size):
    w = table()
    opt = make(2, [w])
    values, indices = np.ones((2, *ROW)), np.array([1, 4])
    for call in range(2):
        values[...], indices[...] = call + 1, [1, 4 + call]
        opt.minimize(gives(hpc.IndexedSlices(values, indices)))
    opt.free()
    assert (-w.value[:6, 0, 0] / size).tolist() == [0, 1.5, 0, 0, 0.5, 1]


@pytest.mark.ranks(min=2)
def test_only_rows_are_copied_and_have_memory(make, rank, size, copies):
    number = 20_000
    w = hpc.Variable(np.zeros((number, 4), "f4"), "w", sparse=True, capacity=3)
    u = hpc.Variable(np.zeros((number, 4), "f4"), "u", sparse=True, capacity=3)
    opt = make(2, [w, u], hpc.Adam(0.1))
    opt.initialize()
    pushes = itertools.count(1)

    def slices(*indices):
        return hpc.IndexedSlices(np.ones((len(indices), 4), "f4"), indices)

    def act(_):
        copies.clear()
        opt.minimize(gives(slices(0, 5, 9 + rank), slices(7)))
        assert copies == []
        # Every second push has no gradient of w, which then is not pulled.
        last = slices(0) if next(pushes) % 2 else None
        opt.minimize(gives(last, slices(8)))
        return list(copies)

    found = turns([*range(size)] * 4, act)

    # First on the root to what is published, at an unknown time; then to this rank.
    assert not any("all" in each for each in found)
    for turn, each in enumerate(found):
        pushed = (turn // size) % 2 == 0
        # Rows of this rank, and of those that have pushed since its last pull.
        others = size if turn >= 2 * size else turn % size + 1
        assert each[-2 if pushed else -1 :] == ([2 + others] if pushed else []) + [2]
    assert internals.gradient_bytes(opt) < 2000


def test_the_sum_has_room_for_the_rows_of_a_period(make, rank, size):
    w, b = table(capacity=2), variable(np.zeros(1), name="b")
    opt, one = make(2, [w, b]), np.ones(1)
    opt.initialize()
    for call in range(4):
        # The last call of a period has no gradient of w.
        pair = rows(call, call + 1, value=call + 1.0) if call % 2 == 0 else None
        opt.minimize(gives(pair, one))
    before = w.value.copy()
    # Its rows are 0 to 3, in two gradients.
    text = "the gradients of 'w' would have 5 different rows, at most 4 can be sent"
    with pytest.raises(INVALID, match=text):
        opt.minimize(gives(rows(1, 4), one))
    same_bits(w.value, before)
    opt.minimize(gives(rows(1, 2), one))
    opt.minimize(gives(rows(3), one))
    opt.free()

    assert (-w.value[:6, 0, 0] / size).tolist() == [0.5, 1, 2, 2, 0, 0]
    assert opt.global_step == 3 * size


def test_init_op_takes_the_center_and_forgets_the_sums(make, rank, size):
    w, b = table(), variable(name="b")
    opt = make(2, [w, b])
    init = opt.get_init_op(task_index=rank)
    init()

    def act(_):
        opt.minimize(gives(rows(1, 3, value=4.0), 4.0))
        init()
        after = *w.value[:4, 0, 0], float(b.value)
        # The count of calls is not forgotten, so this call pushes.
        opt.minimize(gives(rows(1, value=2.0), 2.0))
        return after, (*w.value[:4, 0, 0], float(b.value))

    found = turns(range(size), act)
    # Only the second gradient of each is pushed, as half of a sum.
    assert found == [
        ((0, -n, 0, 0, -n), (0, -n - 1, 0, 0, -n - 1)) for n in range(size)
    ]


def test_a_getter_makes_sparse_variables(comm, rank, size):
    getter = hpc.AGNCustomGetter(comm=comm)
    value = np.zeros((ROWS, *ROW))
    w = hpc.get_variable("w", value, custom_getter=getter, sparse=True, capacity=2)
    assert (w.sparse, w.capacity) == (True, 2)
    with hpc.AGNOptimizer(hpc.SGD(1.0), size, getter, 1) as opt:
        opt.minimize(gives(rows(4)))
        error = raised(opt.minimize, gives(rows(1, 2, 3)))
    assert "has 3 different rows, at most 2" in str(error)
    assert w.value[4, 0, 0] == -size
