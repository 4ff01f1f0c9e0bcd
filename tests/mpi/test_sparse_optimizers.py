"""Optimizers that exchange IndexedSlices, against sums of whole gradients."""

import re
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Reduction
from hpcaccum.rows import exchange as row_exchange

from .acting import meet, same_bits
from .training import ONE_SIDED, gives, raised, started, variable

pytestmark = pytest.mark.any_size

ROWS, ROW = 9, (2, 3)


@pytest.fixture(params=["memory", "messages"])
def way(request, monkeypatch):
    """How rows travel on one node; between nodes, they always do in messages."""
    if request.param == "messages":
        monkeypatch.setattr(row_exchange, "_MOST_BYTES", 0)
    return request.param


@pytest.fixture
def make(make_one, way):
    return lambda rule=None, *args, **options: make_one(
        hpc.CrossShardOptimizer, rule or hpc.SGD(1.0), *args, **options
    )


def table(dtype="f8", name="w", sparse=True):
    return hpc.Variable(np.zeros((ROWS, *ROW), dtype), name, sparse=sparse)


def slices_of(rank, step=0, dtype="f8"):
    """Return the gradient of a rank: rank 1 has no rows, others repeat some."""
    rng = np.random.default_rng([rank, step])
    number = 0 if rank == 1 else 6
    # Sums of these are exact.
    values = rng.integers(-8, 8, (number, *ROW)).astype(dtype)
    return hpc.IndexedSlices(values, rng.integers(0, ROWS - 1, number))


def sum_of(ranks, step=0, weights=(1.0,) * 9):
    """Return the sum of whole gradients, by the plain line of NumPy."""
    total = np.zeros((ROWS, *ROW))
    for rank in ranks:
        slices = slices_of(rank, step)
        np.add.at(total, slices.indices, weights[rank] * slices.values)
    return total


def in_one_call(opt, w, slices, **options):
    return opt.minimize(gives(slices), var_list=[w], **options)


def in_two_calls(opt, w, slices, **options):
    pairs = opt.compute_gradients(gives(slices), [w])
    return opt.apply_gradients(pairs, **options)


EACH_WAY = pytest.mark.parametrize("update", [in_one_call, in_two_calls])


@EACH_WAY
@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_sum_is_that_of_whole_gradients(make, rank, size, reduction, update, dtype):
    w, opt, expected = table(dtype), make(None, reduction), np.zeros((ROWS, *ROW))
    for step, weights in enumerate([(1.0,) * 4, (32.0, 8.0, 0.5, 2.0), (3.0,) * 4]):
        update(opt, w, slices_of(rank, step, dtype), weight=weights[rank])
        mean = sum(weights[:size]) if reduction == Reduction.MEAN else 1
        expected -= sum_of(range(size), step, weights) / mean

    np.testing.assert_allclose(w.value, expected, rtol=1e-6, atol=1e-5)
    assert len(set(meet(w.value.tobytes()))) == 1


def test_the_inner_optimizer_gets_rows(make, rank):
    w, opt = table(), make(hpc.Adam(0.5))
    opt.minimize(gives(hpc.IndexedSlices(np.ones((1, *ROW)), [0])), var_list=[w])
    moved = w.value.copy()
    assert (moved[0] < 0).all()
    opt.minimize(gives(hpc.IndexedSlices(np.ones((1, *ROW)), [2])), var_list=[w])

    same_bits(w.value[:2], moved[:2])
    assert (w.value[2] < 0).all()


def test_slices_of_a_variable_that_is_not_sparse_become_an_array(make, rank, size):
    w, opt = table("f2", sparse=False), make(hpc.Momentum(1.0, 0.5))
    for rows in ([0, 0], [rank % 2, 8]):
        slices = hpc.IndexedSlices(np.ones((2, *ROW), "f2"), rows)
        opt.minimize(gives(slices), var_list=[w])

    assert (w.value[0] < -2).all()
    # The momentum of a row that the second gradients of no rank have.
    alone = w.value[0] if size == 1 else w.value[8]
    assert (alone == (-4 if size == 1 else -1)).all()


def test_memory_is_not_for_whole_gradients(make, size):
    w, b, opt = table(), variable(np.zeros(2), name="b"), make()
    opt.initialize([w, b])

    assert list(opt.gradient_arrays()) == ["b"]
    rule = hpc.SGD(1)
    rule.initialize([w])
    assert rule.gradient_arrays() == {}


@pytest.mark.ranks(min=2)
def test_shard_groups_sum_their_own_rows(make, rank, size):
    groups = [[r] for r in range(size)] if size % 2 else [[0, 1], [2, 3]][: size // 2]
    mine = next(ranks for ranks in groups if rank in ranks)
    w, opt = table(), make(None, Reduction.SUM, "grouped", groups)
    opt.minimize(gives(slices_of(rank)), var_list=[w])

    np.testing.assert_allclose(w.value, -sum_of(mine))


@EACH_WAY
def test_mean_is_over_the_ranks_that_remain(make, rank, size, update):
    w, opt, expected = table(), make(), np.zeros((ROWS, *ROW))
    for step in range(rank + 1):
        update(opt, w, slices_of(rank, step))
    opt.leave()
    opt.free()
    for step in range(size):
        expected -= sum_of(range(step, size), step) / (size - step)

    np.testing.assert_allclose(w.value, expected, rtol=1e-12, atol=1e-12)


@EACH_WAY
def test_rows_that_are_not_finite_are_dropped(make, rank, size, update):
    w, opt = table(), make(on_nonfinite="drop")
    # All ranks have rows.
    slices = slices_of(rank + 2)
    if rank == 0:
        slices.values[2] = np.nan
    receipt = update(opt, w, slices)

    assert (receipt.accepted, receipt.nonfinite) == (rank > 0, rank == 0)
    expected = sum_of(range(3, size + 2)) / max(1, size - 1)
    np.testing.assert_allclose(w.value, -expected, rtol=1e-12, atol=1e-12)
    assert opt.global_step == (size > 1)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("fails_at", [1, 2], ids=["to send", "to receive"])
def test_a_rank_without_memory_does_not_hang_the_others(
    comm, rank, size, monkeypatch, fails_at
):
    monkeypatch.setattr(row_exchange, "_MOST_BYTES", 0)
    w, memory, made = table(), row_exchange._memory, []

    def fail(nbytes):
        made.append(nbytes)
        if len(made) == fails_at:
            raise MemoryError
        return memory(nbytes)

    with hpc.CrossShardOptimizer(hpc.SGD(1.0), name="mine", comm=comm) as opt:
        opt.initialize([w])
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(row_exchange, "_memory", fail)
            error = raised(opt.minimize, gives(slices_of(rank)), var_list=[w])
        assert isinstance(error, MemoryError if rank == 0 else RuntimeError)
        assert rank == 0 or re.match("mine: .*rank 0: ", str(error))
        assert not w.value.any()
        opt.minimize(gives(slices_of(rank)), var_list=[w])
    np.testing.assert_allclose(w.value, -sum_of(range(size)) / size)


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
def test_rows_may_have_any_number(comm, rank, size, reduction, monkeypatch):
    """Some fit in the memory of the node on some ranks only, some need more room."""
    monkeypatch.setattr(row_exchange, "_MOST_BYTES", 20 * 24)
    numbers, expected = (0, 20, 21, 1, 63, 64, 65, 300, 4096), np.zeros((4200, 2))
    w = hpc.Variable(expected.copy(), "w", sparse=True)
    v = hpc.Variable(np.zeros((70, 1), "f4"), "v", sparse=True)
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), reduction, comm=comm) as opt:
        for step in range(3 * len(numbers)):
            grads = []
            for of in range(size):
                number = numbers[(step * (of + 1) + of) % len(numbers)]
                rng = np.random.default_rng([of, step])
                indices = rng.permutation(4200)[:number]
                grads.append(hpc.IndexedSlices(size * np.ones((number, 2)), indices))
                expected[indices] -= size if reduction == Reduction.SUM else 1
            ones = hpc.IndexedSlices(np.ones((70, 1), "f4"), np.arange(70))
            opt.minimize(gives(grads[rank], ones), var_list=[w, v])

    np.testing.assert_array_equal(w.value, expected)
    assert len(set(v.value[:, 0].tolist())) == 1


def test_a_slow_rank_reads_the_rows_of_its_own_step(make, rank, size):
    w, opt, expected = table(), make(None, Reduction.SUM), np.zeros((ROWS, *ROW))
    for step in range(30):
        if (rank + step) % 5 == 0:
            time.sleep(0.002)
        opt.minimize(gives(slices_of(2 * rank, step)), var_list=[w])
        expected -= sum_of(range(0, 2 * size, 2), step)
        np.testing.assert_array_equal(w.value, expected)


@pytest.mark.ranks(min=2)
def test_numbers_of_rows_are_exact_in_any_wire_dtype(group, rank):
    w = hpc.Variable(np.zeros((5000, 1)), "w", sparse=True)
    indices = np.arange(4095 - rank)
    with hpc.CrossShardOptimizer(
        hpc.SGD(1.0), comm=group, wire_dtype="bfloat16"
    ) as opt:
        for _ in range(2):
            grad = hpc.IndexedSlices(np.ones((indices.size, 1)), indices)
            opt.minimize(gives(grad), var_list=[w])

    assert (w.value[: 4095 - group.size] == -2).all()
    assert not w.value[4095:].any()


@pytest.mark.ranks(min=2)
def test_ranks_must_agree_which_variables_are_sparse(make, rank):
    w, opt = table(sparse=rank == 0), make()
    with pytest.raises(hpc.DisagreementError, match="sparse must be the same"):
        opt.initialize([w])


@pytest.mark.ranks(min=2)
def test_several_servers_refuse_sparse_variables(group):
    w, b = table(), variable(name="b")
    servers = [ranks[0] for ranks in group.nodes]
    with ONE_SIDED["AGN"](hpc.SGD(1.0), [w, b], group, servers=servers) as opt:
        text = re.escape(f"'w' needs one server, got servers={servers}; make")
        with pytest.raises(hpc.InvalidArgumentError, match=text):
            opt.initialize([w, b])
        opt.initialize([b])


@pytest.mark.parametrize("both", [False, True])
def test_gradients_may_lie_in_memory_of_the_server(comm, both):
    w, v = table(sparse=False), table(sparse=False, name="v")
    with started(ONE_SIDED["SyncReplicas"](hpc.SGD(1.0), [w, v], comm), [w, v]) as opt:

        def loss():
            # Of w in the place of w, and of v in the place of w, too.
            place = opt.gradient_arrays()["w"]
            place[:3] = [[[1.0]], [[2.0]], [[5.0]]]
            other = place[2:3] if both else np.full((1, *ROW), 5.0)
            return 0.0, [
                hpc.IndexedSlices(place[:2], [1, 2]),
                hpc.IndexedSlices(other, [8]),
            ]

        opt.minimize(loss, var_list=[w, v])
        meet()
        assert opt.center(w)[:3, 0, 0].tolist() == [0, -1, -2]
        assert opt.center(v)[[0, 8], 1, 1].tolist() == [0, -5]


def test_sparse_variables_have_rows():
    for value in (3.0, np.float32(1)):
        with pytest.raises(hpc.InvalidArgumentError, match="must be an array"):
            hpc.Variable(value, "w", sparse=True)
    w = hpc.Variable(np.zeros(3), "w", sparse=True)
    assert w.copy().sparse
    assert (w.capacity, w.copy().capacity) == (3, 3)
    assert repr(w) == "Variable('w', float64 (3,), sparse, [0. 0. 0.])"


def test_capacity_is_that_of_a_sparse_variable():
    rows = np.zeros((3, 2))
    sparse = [hpc.Variable(rows, "w", sparse=True, capacity=n) for n in (1, 2, 9)]
    assert [w.capacity for w in sparse] == [1, 2, 3]
    assert sparse[0].copy().capacity == 1
    assert hpc.Variable(rows, "w").capacity == 0
    with pytest.raises(hpc.InvalidArgumentError, match="'w' needs sparse=True"):
        hpc.Variable(rows, "w", capacity=2)
    with pytest.raises(hpc.InvalidArgumentError, match="must be at least 1, got 0"):
        hpc.Variable(rows, "w", sparse=True, capacity=0)
    with pytest.raises(TypeError, match="must be an integer"):
        hpc.Variable(rows, "w", sparse=True, capacity=1.5)


def test_slices_of_variables_are_in_cpu_memory(cp):
    grad = hpc.IndexedSlices(cp.zeros((1, 2)), [0])
    v = hpc.Variable(np.zeros((1, 2)), "v")
    message = "gradient of 'v' is an IndexedSlices on the device, the variable is in"
    for call in (
        hpc.SGD(1).apply_gradients,
        lambda pairs: hpc.clip_by_global_norm(pairs, 1.0),
    ):
        with pytest.raises(hpc.InvalidArgumentError, match=message):
            call([(grad, v)])
    with pytest.raises(hpc.InvalidArgumentError, match="in CPU memory with"):
        hpc.Variable(cp.zeros((1, 2)), "w", sparse=True)
    w = hpc.Variable(cp.zeros((1, 2)), "w")
    with pytest.raises(hpc.InvalidArgumentError, match="the variable is on the device"):
        hpc.SGD(1).apply_gradients([(hpc.IndexedSlices(np.ones((1, 2)), [0]), w)])


@pytest.mark.parametrize(
    ("repeated", "on_nonfinite"), [(False, "accept"), (True, "drop")]
)
def test_slices_of_sparse_variables_may_be_on_a_device(
    cp, make, rank, size, repeated, on_nonfinite
):
    def gradient(of):
        random = np.random.default_rng((of, step))
        indices = random.integers(0, 9, 12) if repeated else random.permutation(9)[:5]
        # Multiples of the number of ranks: sums and means are exact.
        values = size * random.integers(-9, 9, (indices.size, *ROW))
        return indices, values.astype(np.float32)

    def mine():
        indices, values = gradient(rank)
        return hpc.IndexedSlices(cp.asarray(values), cp.asarray(indices))

    w, expected = table("f4"), np.zeros((ROWS, *ROW), np.float32)
    opt = make(on_nonfinite=on_nonfinite)
    for step in range(4):
        (in_one_call if step % 2 else in_two_calls)(opt, w, mine())
        for of in range(size):
            indices, values = gradient(of)
            np.add.at(expected, indices, -values / np.float32(size))
        np.testing.assert_array_equal(w.value, expected)
    pairs = opt.compute_gradients(gives(mine()), [w])
    clipped, norm = hpc.clip_by_global_norm(pairs, 1e-3)
    assert norm > 1e-3
    opt.apply_gradients(clipped)
