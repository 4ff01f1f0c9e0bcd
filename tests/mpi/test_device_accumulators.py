"""Accumulators with gradients on a device, dense and of rows."""

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.dtypes import accumulation_dtype
from tests import internals

from .acting import WAIT, at, meet, same_bits
from .on_device import FEW_RANKS
from .training import check_error, raised

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError
ROWS, WIDTH = 50, 7
DTYPES = ["float32", "float16", ml_dtypes.bfloat16, "float64"]


@pytest.fixture
def make(make_one):
    return lambda dtype=np.float32, **options: make_one(
        hpc.SparseConditionalAccumulator,
        *(dtype, (ROWS, WIDTH)),
        **{"capacity": 40} | options,
    )


def drawn(kind, dtype, *seed):
    """Return indices and values of a gradient; any order of summation is exact."""
    random = np.random.default_rng(seed)
    indices = random.permutation(ROWS)[:20]
    if kind == "ascending":
        indices = np.sort(indices)
    if kind == "repeated":
        indices = random.integers(0, ROWS, 20)
        indices[:2] = 3
    return indices, random.integers(-9, 9, (20, WIDTH)).astype(dtype)


def expected(gradients, dtype, *, mean=True):
    """Return the rows that gradients have, and their reduction, by np.add.at."""
    wide = accumulation_dtype(np.dtype(dtype))
    total, counts = np.zeros((ROWS, WIDTH), wide), np.zeros(ROWS, int)
    for indices, values in gradients:
        np.add.at(total, indices, values.astype(dtype).astype(wide))
        counts[np.unique(indices)] += 1
    rows = np.flatnonzero(counts)
    divisors = counts[rows, None].astype(wide) if mean else wide.type(1)
    return rows, (total[rows] / divisors).astype(dtype)


def check(taken, gradients, dtype, **options):
    indices, values = expected(gradients, dtype, **options)
    found = [each.get() if hasattr(each, "get") else each for each in taken[:2]]
    np.testing.assert_array_equal(found[0], indices)
    assert found[0].dtype == np.int64
    assert found[1].dtype == np.dtype(dtype)
    assert found[1].tobytes() == values.tobytes()


def check_take(acc, gradients, dtype="float32", **options):
    """Have rank 0 take so many gradients, and compare. Collective."""

    def act():
        taken = acc.take_grad(len(gradients), timeout=WAIT)
        check(taken, gradients, dtype, **options)

    at(0, act)


def apply_on_device(cp, acc, indices, values, step=0, *, where="both"):
    rows = cp.asarray(indices) if where == "both" else indices
    array = cp.asarray(values)
    receipt = acc.apply_grad(rows, array, local_step=step)
    # Allowed after the call.
    array.fill(0)
    return receipt


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["ascending", "any", "repeated"])
def test_rows_of_the_device_are_added(cp, make, rank, size, dtype, kind):
    acc = make(dtype)
    for step in range(3):
        where = "both" if step else "values"
        mine = drawn(kind, dtype, rank, step)
        assert apply_on_device(cp, acc, *mine, step, where=where)
        check_take(acc, [drawn(kind, dtype, r, step) for r in range(size)], dtype)


@pytest.mark.parametrize("kind", ["ascending", "any", "repeated"])
def test_several_of_one_rank_from_both_memories_and_of_any_dtype(
    cp, make, rank, size, kind
):
    acc = make(reduction_type="SUM", capacity=ROWS)
    for number, dtype in enumerate(["float64", "float16", "float32"]):
        indices, values = drawn(kind, dtype, rank, number)
        kept = np.int32 if number == 1 else np.int64
        apply_on_device(cp, acc, indices.astype(kept), values)
        acc.apply_grad(*drawn(kind, dtype, rank, number, 1))
    every = [
        drawn(kind, "float32", other, number, *more)
        for other in range(size)
        for number in range(3)
        for more in ((), (1,))
    ]
    check_take(acc, every, mean=False)


def test_sums_have_the_bits_of_cpu_memory(cp, make, rank, size):
    found = []
    random = np.random.default_rng(rank)
    indices, values = random.integers(0, 5, 40), random.normal(size=(40, WIDTH))
    for copied in (np.asarray, cp.asarray):
        acc = make()
        acc.apply_grad(copied(indices), copied(values.astype("float32")))
        found.append(at(0, acc.take_grad, size, timeout=WAIT).values.tobytes())
    assert len(set(found)) == 1


def test_means_may_be_returned_on_the_device(cp, make, rank, size):
    acc = make()
    for step in range(2):
        mine = drawn("any", "float32", rank, step)
        acc.apply_grad(*mine, local_step=step)
        meet()
        if rank == 0:
            gradients = [drawn("any", "float32", other, step) for other in range(size)]
            with cp.cuda.Stream(non_blocking=True):
                if step:
                    slices = acc.take_indexed_slices_grad(size, on_device=True)
                    assert slices.dense_shape == (ROWS, WIDTH)
                    taken = slices.indices, slices.values
                else:
                    taken = acc.take_grad(size, timeout=WAIT, on_device=True)
                    assert taken.shape.tolist() == [ROWS, WIDTH]
            assert isinstance(taken[0], cp.ndarray)
            assert isinstance(taken[1], cp.ndarray)
            check(taken, gradients, "float32")
        meet()


def test_a_mean_that_cannot_be_copied_to_the_device_is_not_lost(cp, make, rank, size):
    acc = make()
    acc.apply_grad(*drawn("any", "float32", rank))
    with internals.fail("deliver", None, MemoryError), pytest.raises(MemoryError):
        at(0, acc.take_grad, size, timeout=WAIT, on_device=True)
    check_take(acc, [drawn("any", "float32", other) for other in range(size)])


def test_rows_of_a_stream_of_the_caller(cp, make, rank, size):
    acc = make()
    for step in range(3):
        mine = drawn("any", "float32", rank, step)
        with cp.cuda.Stream(non_blocking=True):
            rows, values = cp.asarray(mine[0]), cp.asarray(mine[1] * 2)
            values /= 2
            acc.apply_indexed_slices_grad(hpc.IndexedSlices(values, rows), step)
            values.fill(9)
        check_take(acc, [drawn("any", "float32", other, step) for other in range(size)])


def test_buffers_are_pinned_at_the_first_rows_of_a_device(cp, pinned, make, rank):
    acc = make()
    acc.apply_grad(*drawn("any", "float32", rank))
    assert not pinned
    for _ in range(2):
        apply_on_device(cp, acc, *drawn("any", "float32", rank))
        assert len(pinned) == 1
    meet()
    acc.free()
    assert not pinned


def test_rows_that_do_not_fit_are_an_error_on_this_rank(cp, make, rank):
    acc = make(name="rows", capacity=2)
    values, rows = cp.ones((2, WIDTH), np.float32), cp.asarray([4, 5])
    for wrong, text in [
        ((rows.astype("f4"), values), "indices: .* of int64, int32, got float32"),
        ((rows, values.astype("i4")), "values: .* got int32"),
        ((rows, cp.ones((2, 2 * WIDTH), "f4")[:, ::2]), "values: .* contiguous"),
        ((rows + ROWS, values), f"indices must be less than {ROWS}, got {ROWS + 5}"),
        ((rows, values.get()), "indices are on the device, values in CPU memory"),
    ]:
        error = raised(acc.apply_grad, *wrong)
        assert type(error) is INVALID, (error, text)
        with pytest.raises(INVALID, match=text):
            raise error
    meet()
    assert acc.num_accumulated() == 0
    meet()
    assert acc.apply_grad(rows, values)
    check_error(raised(acc.apply_grad, cp.asarray([6]), values[:1]), "would have 3")


def test_slices_on_a_device(cp):
    slices = hpc.IndexedSlices(cp.ones((2, 3), "f4"), [5, 1], (9, 3))

    assert slices.on_device
    assert not hpc.IndexedSlices(np.ones((2, 3)), [5, 1]).on_device
    assert repr(slices) == "<IndexedSlices: 2 rows of (9, 3), float32 (2, 3)>"
    with pytest.raises(INVALID, match="on a device cannot be converted to an array"):
        slices.to_dense()


N = 1000


@pytest.fixture(params=["slots", "sum"])
def make_dense(request, make_one):
    kind, storage = hpc.ConditionalAccumulator, request.param
    return lambda dtype=np.float32, shape=(N,), **options: make_one(
        kind, dtype, shape, storage=storage, **options
    )


def drawn_dense(rank, dtype=np.float32):
    # Sums of small integers are exact in any order.
    return np.random.default_rng(rank).integers(-9, 9, N).astype(dtype)


@FEW_RANKS
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_device_are_added(cp, make_dense, rank, size, dtype):
    acc, wide = make_dense(dtype), accumulation_dtype(np.dtype(dtype))
    for step in range(3):
        grad = cp.asarray(drawn_dense(rank, dtype))
        grad *= 2
        assert acc.apply_grad(grad, step)
        grad.fill(0)  # allowed after the call
        total = sum(2 * drawn_dense(other, wide) for other in range(size))
        mean = (total / wide.type(size)).astype(dtype)
        same_bits(at(0, acc.take_grad, size), mean)


@FEW_RANKS
def test_several_of_one_rank_and_of_any_dtype(cp, make_dense, rank, size):
    acc = make_dense(shape=(2, N // 2), reduction_type="SUM")
    for dtype in ("float32", "float16", "float64"):
        acc.apply_grad(cp.asarray(drawn_dense(rank, dtype)).reshape(2, -1))
        acc.apply_grad(drawn_dense(rank, dtype).reshape(2, -1))
    total = 6 * sum(drawn_dense(other) for other in range(size))
    same_bits(at(0, acc.take_grad, 6 * size), total.reshape(2, -1))


@FEW_RANKS
def test_what_is_taken_may_go_to_the_device(cp, make_dense, rank, size):
    acc = make_dense()
    acc.apply_grad(cp.asarray(drawn_dense(rank)))
    meet()
    if rank == size - 1:
        out = cp.full((N,), -7, np.float32)
        assert acc.take_grad(size, out=out) is out
        mean = sum(drawn_dense(other) for other in range(size)) / np.float32(size)
        np.testing.assert_array_equal(out.get(), mean.astype(np.float32))


@FEW_RANKS
def test_a_stale_gradient_is_not_even_copied(cp, make_dense, rank, monkeypatch):
    # A shorter one may be part of the request to admit it.
    acc = make_dense(shape=(3 * N,))
    meet(acc.set_global_step(1) if rank == 0 else None)
    grad = cp.ones(3 * N, np.float32)
    monkeypatch.setattr(type(grad), "get", None)
    receipt = acc.apply_grad(grad, 0)

    assert not receipt
    assert receipt.lag == 1


@FEW_RANKS
def test_slots_are_pinned_until_they_are_freed(cp, pinned, make_dense, rank):
    acc = make_dense()
    assert not pinned
    for _ in range(2):
        acc.apply_grad(cp.asarray(drawn_dense(rank)))
    assert len(pinned) == (acc.statistics().storage == "slots")
    acc.free()


@FEW_RANKS
def test_bad_gradients_leave_nothing_behind(cp, make_dense, rank, size):
    acc = make_dense()
    bad = {
        "contiguous": cp.ones(2 * N, np.float32)[::2],
        "got int64": cp.ones(N, np.int64),
        "shape (1000,), got shape (999,)": cp.ones(N - 1, np.float32),
    }
    for message, grad in bad.items():
        error = raised(acc.apply_grad, grad)
        check_error(error, message)
    outs = {
        "must be float32 (1000,)": cp.ones(N, np.float64),
        "contiguous": cp.ones(2 * N, np.float32)[::2],
    }
    for message, out in outs.items():
        error = raised(acc.take_grad, 1, out=out, timeout=0)
        check_error(error, message)
    assert acc.num_accumulated() == 0
