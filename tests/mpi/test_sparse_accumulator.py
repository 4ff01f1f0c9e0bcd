"""SparseConditionalAccumulator: one operation at a time, each on another rank."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import hpcaccum as hpc

from .acting import WAIT, Makers, Take, at, everywhere, meet, same_bits
from .support import together

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError
ANY_STEP = 2**32
MAKERS = Makers(hpc.SparseConditionalAccumulator)


@pytest.fixture
def make():
    """Make accumulators of matrices with 10 rows of 2, which tests share."""

    def one(dtype="float64", shape=(10, 2), capacity=8, **options):
        return MAKERS(dtype, shape, capacity=capacity, **options)

    yield one
    MAKERS.take_back()


@pytest.fixture
def acc(make):
    return make()


def check(taken, indices, values, dtype="float64", rows=10):
    """Compare what a take returned; values may be one number a row."""
    values = np.array(values, dtype)
    if values.ndim == 1:
        values = np.repeat(values[:, None], 2, 1)
    same_bits(taken.indices, np.array(indices, np.int64))
    same_bits(taken.values, values)
    same_bits(taken.shape, np.array([rows, *values.shape[1:]]))


def filled(*rows):
    """Return rows of two with one number each."""
    return np.repeat(np.array(rows, float).reshape(-1, 1), 2, 1)


def test_stale_gradient_is_dropped_and_not_checked(acc):
    at(0, acc.set_global_step, 3)
    wrong = [99] * 20, np.ones((20, 7))
    receipts = [at(s, acc.apply_grad, *wrong, [5], local_step=s) for s in (2, -1)]

    assert receipts == [hpc.Receipt(False, 2, 3), hpc.Receipt(False, -1, 3)]
    assert at(1, acc.apply_grad, [1], filled(1), local_step=3)
    assert at(0, acc.num_accumulated) == 1


def test_indexed_slices_go_in_and_out(acc):
    slices = hpc.IndexedSlices(filled(4, 2), [8, 3], (10, 2))
    receipt = at(1, acc.apply_indexed_slices_grad, slices, 5)
    assert receipt == hpc.Receipt(True, 5, 0)

    def take():
        taken = acc.take_indexed_slices_grad(1, timeout=WAIT)
        return taken.indices.tolist(), taken.values, taken.dense_shape

    indices, values, shape = at(2, take)
    assert (indices, shape) == ([3, 8], (10, 2))
    same_bits(values, filled(2, 4))
    with pytest.raises(TypeError, match="must be an IndexedSlices, got ndarray"):
        at(0, acc.apply_indexed_slices_grad, np.ones((10, 2)))


def test_arrays_of_gradients_and_results_are_the_callers(acc):
    kept = []

    def apply_and_spoil(indices, values):
        acc.apply_grad(indices, values)
        indices[:], values[:] = 7, 99
        acc.apply_grad(indices[:1], values[:1])
        indices[:], values[:] = 9, 77

    at(1, apply_and_spoil, np.array([2, 3]), filled(1, 2))
    at(1, lambda: kept.append(acc.take_grad(2, timeout=WAIT)))
    for step in (1, 2, 3):
        at(0, acc.apply_grad, [5], filled(9), None, step)
        at(2, acc.take_grad, 1, timeout=WAIT)

    check(at(1, lambda: kept[0]), [2, 3, 7], [1, 2, 99])


@pytest.mark.parametrize("shape", [None, (), (None, None), (10, None)])
def test_first_gradient_fixes_the_row_of_its_round_only(make, shape):
    acc = make(shape=shape, row_size=6)
    rows = 10 if shape == (10, None) else -1
    for step, row in enumerate([(2, 3), (), (5,), (0,)]):
        if shape and not row:
            continue
        values = np.arange(2 * np.prod(row, dtype=int)).reshape(2, *row)
        step = at(0, lambda: acc.global_step)
        assert at(0, acc.apply_grad, [1, 2], values, None, step)
        error = r"rows must be .* like the others of this round, got \(1, 2\)"
        with pytest.raises(INVALID, match=error):
            at(1, acc.apply_grad, [1], np.ones((1, 1, 2)), None, step)
        at(1, acc.apply_grad, [2], values[:1], None, step)

        taken = at(2, acc.take_grad, 2, timeout=WAIT)
        values[1] = (values[0] + values[1]) / 2
        same_bits(taken.values[:1], values[:1].astype("f8"))
        same_bits(taken.shape, np.array([rows, *row]))


# Errors of the rank that applies; the message, then the arguments of apply_grad.
WRONG = {
    "dense_shape must begin with (10, 2), got (9, 2)": ([1], filled(1), (9, 2)),
    "dense_shape must begin with (10, 2), got (10,)": ([1], filled(1), [10]),
    "dense_shape must begin with (10, 2), got ()": ([1], filled(1), []),
    "indices must be less than 10, got 10": ([3, 10, 2], filled(1, 2, 3)),
    "rows must begin with (2,), got (3,)": ([1], np.ones((1, 3))),
    "rows must begin with (2,), got ()": ([1], [1.0]),
    "at most 2 elements (row_size=), got (2, 3)": ([1], np.ones((1, 2, 3))),
    "a gradient must have at most 8 different rows (capacity=), got 9": (
        range(9),
        np.ones((9, 2)),
    ),
    "indices must be a vector": (1, filled(1)),
    "values must have 2 rows": ([1, 2], filled(1)),
}


def test_gradient_that_does_not_fit_changes_nothing(acc):
    for text, gradient in WRONG.items():
        with pytest.raises(INVALID) as caught:
            at(1, acc.apply_grad, *gradient)
        assert text in str(caught.value)
        assert at(0, acc.num_accumulated) == 0

    assert at(1, acc.apply_grad, [-3, 9], filled(1, 2), (10, 2, 5))
    check(at(0, acc.take_grad, 1, timeout=WAIT), [-3, 9], [1, 2])


@pytest.mark.parametrize("waiting", [False, True])
def test_rows_beyond_the_capacity_change_nothing(acc, size, waiting):
    at(-1, acc.apply_grad, range(6), np.ones((6, 2)))
    take = Take(acc, 0, 3) if waiting else None
    error = rf"at most 8 different rows \(capacity=\); those of rank {size - 1} would"
    with pytest.raises(INVALID, match=error + " have 9"):
        at(-1, acc.apply_grad, [9, 8, 5, 7], np.ones((4, 2)))
    assert at(0, acc.num_accumulated) == 1
    # Rows that it has already, and those of other ranks, take no more room.
    assert at(-1, acc.apply_grad, [1, 5, 7, 8], np.ones((4, 2)))
    assert at(-1 if size == 1 else 0, acc.apply_grad, [2], filled(7))

    taken = take.result() if take else at(1, acc.take_grad, 3, timeout=WAIT)
    check(taken, [0, 1, 2, 3, 4, 5, 7, 8], [1, 1, 4, 1, 1, 1, 1, 1])
    assert at(0, acc.statistics).num_lost == 0
    # The other round has room.
    assert at(-1, acc.apply_grad, range(1, 9), np.ones((8, 2)), None, 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_halves_are_summed_in_float32(make, dtype):
    acc = make(dtype, (10,), row_size=2)
    large = {"float16": 2048, "bfloat16": 256}.get(dtype, 7)
    for rank, value in enumerate([large, 1, 1]):
        at(rank, acc.apply_grad, [3, 3], [[value, 0]] * 2)

    taken = at(1, acc.take_grad, 3, timeout=WAIT)
    same_bits(taken.values, np.array([[2 * (large + 2) / 3, 0]], dtype))


def test_rows_are_added_in_rank_order(make, size):
    acc = make("float32", (100, 3), capacity=200)
    rng = np.random.default_rng(0)
    grads = [
        (rng.integers(0, 100, 50), rng.normal(size=(50, 3)).astype("f4"))
        for _ in range(size)
    ]
    for rank in reversed(range(size)):
        at(rank, acc.apply_grad, *grads[rank])

    total, counts = np.zeros((100, 3), "f4"), np.zeros((100, 1), "f4")
    for indices, values in grads:
        own = np.zeros((100, 3), "f4")
        np.add.at(own, indices, values)
        total += own
        counts[np.unique(indices)] += 1
    rows = np.flatnonzero(counts)
    check(
        at(1, acc.take_grad, size, timeout=WAIT),
        rows,
        total[rows] / counts[rows],
        "f4",
        100,
    )


BAD = [
    (
        {"capacity": None},
        INVALID,
        "capacity=, the maximum number of rows .* in one round",
    ),
    ({"capacity": 0}, INVALID, "capacity must be at least 1"),
    ({"row_size": 0}, INVALID, "row_size must be at least 1"),
    ({"shape": (9, 2, 3), "row_size": 5}, INVALID, "at least the 6 elements of a row"),
    ({"shape": None}, INVALID, "shape None has rows of unknown size: pass row_size="),
    ({"capacity": 2**40}, INVALID, r"needs \d+\.\d MiB of /dev/shm"),
]


def test_bad_argument_of_one_rank_is_an_error_on_all(rank, size):
    for options, error, text in BAD:
        good = {"dtype": "f4", "shape": (10, 2), "capacity": 3}
        if rank == size - 1 or "needs" in text:
            good.update(options)
        with pytest.raises(error, match=text):
            hpc.SparseConditionalAccumulator(**good)


def test_shared_name_is_one_object_of_one_kind():
    make = functools.partial(
        hpc.SparseConditionalAccumulator, "f8", (10, 2), "rows", capacity=3
    )
    with make() as first, make(name="second") as second:
        at(1, first.apply_grad, [1], filled(1))
        assert second.num_accumulated() == 1
        meet()
        with pytest.raises(
            INVALID, match="'rows' already exists with row_size 2, got 5"
        ):
            make(row_size=5)
        with pytest.raises(
            INVALID, match="'rows' already exists and is sparse, not dense"
        ):
            hpc.ConditionalAccumulator("f8", (10, 2), "rows")
        check(at(0, second.take_grad, 1, timeout=WAIT), [1], [1])


def test_numbers_of_an_accumulator_and_its_end(comm, size):
    acc = hpc.SparseConditionalAccumulator(
        "f2", (10, 3), name="rows", comm=comm, capacity=100
    )
    assert (acc.name, acc.dtype) == ("rows", np.float16)
    text = "<SparseConditionalAccumulator 'rows' float16 (10, 3): step 0, 0 accumulated"
    assert repr(acc) == text + ", rows>"
    everywhere(acc.apply_grad, [1], np.ones((1, 3)))
    acc.leave()
    meet()
    found = acc.statistics()
    assert (found.storage, found.tally.accepted) == ("rows", (1,) * size)
    # Two buffers of 100 rows of 28 bytes; another for other nodes.
    assert found.window_bytes // 2 in range(100 * 28, 150 * 28 + 128)
    assert at(0, acc.take_grad, 9, timeout=WAIT).values.tolist() == [[1, 1, 1]]
    assert [at(0, acc.snapshot)["global_step"], acc.global_step] == [1, 1]
    acc.free()
    for use in (acc.take_grad, acc.take_indexed_slices_grad):
        with pytest.raises(hpc.FreedError, match="'rows' was freed"):
            use(1)
    with pytest.raises(hpc.FreedError, match="'rows' was freed"):
        acc.apply_grad([1], np.ones((1, 3)))


def test_dense_accumulator_takes_slices_with_a_shape():
    with hpc.ConditionalAccumulator("f8", (4, 2)) as acc:
        slices = hpc.IndexedSlices(filled(1, 2, 3), [3, 0, 3], (4, 2))
        at(1, acc.apply_grad, slices)
        same_bits(at(0, acc.take_grad, 1, timeout=WAIT), filled(2, 0, 0, 4))
        # They are added in the accumulator's dtype, as gradients are.
        many = hpc.IndexedSlices(np.full((3, 2), 100, np.int8), [0, 0, 0], (4, 2))
        at(0, acc.apply_grad, many, 1)
        same_bits(at(0, acc.take_grad, 1, timeout=WAIT), filled(300, 0, 0, 0))
        with pytest.raises(INVALID, match="to an array without dense_shape"):
            at(0, acc.apply_grad, hpc.IndexedSlices(filled(1), [0]), 2)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("row", [(2,), (4096,)], ids=["short", "long"])
def test_rows_of_other_nodes_are_fetched(group, size, row):
    # Long ones are fetched in two parts.
    acc = hpc.SparseConditionalAccumulator("f4", (10, *row), capacity=4, comm=group)
    for taker, weights in (0, [1] * size), (-1, range(1, size + 1)):
        for rank, weight in enumerate(weights):
            gradient = [9, rank], np.full((2, *row), rank, "f4"), None, ANY_STEP
            at(rank, functools.partial(acc.apply_grad, weight=weight), *gradient)
        taken = at(taker, acc.take_grad, size, timeout=WAIT)

        assert taken.indices.tolist() == [*range(size), 9]
        means = [*range(size), np.average(range(size), weights=weights)]
        expected = np.repeat(np.array(means, "f4")[:, None], row[0], 1)
        np.testing.assert_allclose(taken.values, expected, 1e-6)
    meet()
    acc.free()


# Random operations, against a dense model.

steps = st.integers(-1, 4)
rows = st.lists(st.integers(0, 9), max_size=6)
operations = st.one_of(
    st.tuples(st.just("apply"), st.integers(0, 3), rows, st.none() | steps),
    st.tuples(st.just("apply"), st.integers(0, 3), rows, st.none()),
    st.tuples(st.just("take"), st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("step"), st.integers(0, 3), steps),
)


class Model:
    """A sparse accumulator that stores whole matrices."""

    def __init__(self):
        self.step, self.held = 0, []

    def apply(self, rank, indices, values, step):
        held = {row for who, grad, _ in self.held if who == rank for row in grad}
        if step < self.step:
            return False
        if len(held | set(indices)) > 5:
            return INVALID
        self.held.append((rank, indices, values))
        return True

    def take(self, required):
        if len(self.held) < required:
            return hpc.WaitTimeoutError
        total, counts = np.zeros((10, 2)), np.zeros(10)
        for _, indices, values in self.held:
            np.add.at(total, np.array(indices, int), values)
            counts[list(set(indices))] += 1
        self.step, self.held = self.step + 1, []
        union = np.flatnonzero(counts)
        return union, total[union] / counts[union, None]


@settings(max_examples=15)
@given(st.lists(operations, min_size=5, max_size=25))
@together
def test_accumulator_does_what_the_model_does(drawn):
    acc, model, number = MAKERS("float64", (10, 2), capacity=5), Model(), 0
    try:
        for kind, rank, *rest in drawn:
            rank %= MPI.COMM_WORLD.size
            if kind == "step":
                at(rank, acc.set_global_step, *rest)
                model.step = rest[0]
            elif kind == "take":
                expected = model.take(*rest)
                found = at(rank, outcome, acc.take_grad, *rest, timeout=0)
                same(found, expected)
            else:
                indices, step = rest
                number += 1
                values = filled(*(2.0 ** (number % 9) + k for k in range(len(indices))))
                step = model.step if step is None else step
                expected = model.apply(rank, indices, values, step)
                found = at(rank, outcome, acc.apply_grad, indices, values, None, step)
                same(found, expected)
            state = at(0, lambda: (acc.num_accumulated(), acc.global_step))
            assert state == (len(model.held), model.step)
    finally:
        MAKERS.take_back()


def outcome(do, *args, **kwargs):
    try:
        return do(*args, **kwargs)
    except (INVALID, hpc.WaitTimeoutError) as error:
        return type(error)


def same(found, expected):
    if isinstance(expected, tuple):
        np.testing.assert_array_equal(found.indices, expected[0])
        np.testing.assert_array_equal(found.values, expected[1])
    elif isinstance(expected, bool):
        assert bool(found) == expected
    else:
        assert found is expected
