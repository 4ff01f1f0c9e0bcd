"""Update rules with IndexedSlices, against the formulas on the rows that they have."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.optimizers import update_rule

from ..common import same_bits
from ..lazy_rules import MAKERS, LazyRule
from .test_rules import DTYPES, TOLERANCE

INVALID = hpc.InvalidArgumentError


def lazily(rule, value, grads):
    """Return the value after some updates."""
    model = LazyRule(rule, value)
    for indices, values in grads:
        model.update(indices, values)
    return model.value


def random_grads(number=4, rows=7, row=(3,), dtype=np.float64):
    rng = np.random.default_rng(number)
    sizes = [0, 1, 5, 9][:number]
    return [
        (rng.integers(0, rows - 1, n), rng.normal(size=(n, *row)).astype(dtype))
        for n in sizes
    ]


@pytest.mark.parametrize("piece", [2, 7, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", MAKERS)
def test_rows_are_updated_by_the_formulas(monkeypatch, rule, dtype, piece):
    # Pieces of less than a row, of two rows, and of all.
    monkeypatch.setattr(update_rule, "PIECE", piece)
    start = np.random.default_rng(0).normal(size=(7, 3)).astype(dtype)
    w, opt, grads = hpc.Variable(start.copy(), "w"), MAKERS[rule](), random_grads()
    for indices, values in grads:
        opt.apply_gradients([(hpc.IndexedSlices(values, indices, (7, 3)), w)])

    expected = lazily(rule, start, grads)
    np.testing.assert_allclose(
        w.value.astype("f8"), expected, rtol=4 * TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    # No gradient has the last row.
    same_bits(w.value[6], start[6])


@pytest.mark.parametrize("rule", ["SGD", "Adagrad"])
def test_the_effect_is_that_of_the_array(rule):
    sparse, dense = (hpc.Variable(np.ones((7, 2, 3), "f4"), "w") for _ in range(2))
    one, other = MAKERS[rule](), MAKERS[rule]()
    for indices, values in random_grads(row=(2, 3), dtype="f4"):
        slices = hpc.IndexedSlices(values, indices, (7, 2, 3))
        one.apply_gradients([(slices, sparse)])
        other.apply_gradients([(slices.to_dense(), dense)])

    same_bits(sparse.value, dense.value)


@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_variables_and_slots_of_any_memory_order(order):
    memory = np.ones((5, 6), "f4", order="F" if order == "F" else "C")
    value = memory[:, ::2] if order == "strided" else memory[:, :3]
    w, opt = hpc.Variable(value, "w"), hpc.Momentum(0.5, 0.75)
    grads = random_grads(rows=5)
    for indices, values in grads:
        opt.apply_gradients([(hpc.IndexedSlices(values, indices), w)])
    # An array may follow.
    opt.apply_gradients([(np.zeros((5, 3)), w)])

    expected = lazily(
        "Momentum", np.ones((5, 3)), [*grads, (range(5), np.zeros((5, 3)))]
    )
    np.testing.assert_allclose(w.value, expected, rtol=1e-5, atol=1e-5)


def test_vectors_have_rows_of_one_element():
    w = hpc.Variable(np.zeros(4, "f4"), "w")
    hpc.SGD(1).apply_gradients([(hpc.IndexedSlices([1, 2, 4], [3, 0, 3]), w)])

    assert w.value.tolist() == [-2, 0, 0, -5]


def test_dense_and_sparse_gradients_in_one_call():
    w, b = hpc.Variable(np.zeros((3, 1)), "w"), hpc.Variable(np.zeros(2), "b")
    loss = lambda: (0.0, {"w": hpc.IndexedSlices([[2.0]], [1]), "b": [1.0, 3.0]})  # noqa: E731
    hpc.SGD(0.5).minimize(loss, var_list=[w, b], grad_loss=2)

    assert w.value.tolist() == [[0], [-2], [0]]
    assert b.value.tolist() == [-1, -3]


def test_gradient_in_the_memory_of_the_variables():
    # The gradient of each row is the row before, that of v is w.
    w, v = (
        hpc.Variable(np.array([[1.0], [2.0], [4.0]]), "w"),
        hpc.Variable([[1.0]], "v"),
    )
    pairs = [
        (hpc.IndexedSlices(w.value[:2], [1, 2]), w),
        (hpc.IndexedSlices(w.value[1:2], [0]), v),
    ]
    hpc.SGD(1).apply_gradients(pairs)

    assert w.value.tolist() == [[1], [1], [2]]
    assert v.value.tolist() == [[-1]]


@pytest.mark.parametrize("piece", [1, 1 << 16])
def test_gradient_in_the_memory_of_its_own_variable(monkeypatch, piece):
    monkeypatch.setattr(update_rule, "PIECE", piece)
    w = hpc.Variable(np.arange(4.0).reshape(4, 1), "w")
    hpc.SGD(1).apply_gradients([(hpc.IndexedSlices(w.value[:3], [1, 2, 3]), w)])

    assert w.value.tolist() == [[0], [1], [1], [1]]


def test_the_number_of_rows_of_a_gradient_may_be_unknown():
    w = hpc.Variable(np.zeros((5, 2)), "w")
    slices = hpc.IndexedSlices(np.ones((1, 2)), [3], (-1, 2))
    hpc.SGD(1).apply_gradients([(slices, w)])
    assert w.value.sum(axis=1).tolist() == [0, 0, 0, -2, 0]


@pytest.mark.parametrize(
    ("indices", "shape", "dense_shape", "text"),
    [
        ([5], (1, 2), None, r"gradient of 'w': indices must be in 0 to 4, got 5"),
        ([-1], (1, 2), None, "got -1"),
        ([1], (1, 3), None, r"gradient of 'w', which has shape \(5, 2\), .* \(3,\)"),
        ([1], (1,), None, r"cannot have rows of shape \(\)"),
        ([1], (1, 2), (6, 2), r"dense_shape \(5, 2\), got \(6, 2\)"),
        ([1], (1, 2), (-1, 3), r"dense_shape \(5, 2\), got \(-1, 3\)"),
    ],
)
def test_gradient_that_does_not_fit_changes_nothing(indices, shape, dense_shape, text):
    b, w = hpc.Variable(np.zeros(2), "b"), hpc.Variable(np.zeros((5, 2)), "w")
    slices = hpc.IndexedSlices(np.ones(shape), indices, dense_shape)
    opt = hpc.SGD(1)
    with pytest.raises(INVALID, match=text):
        opt.apply_gradients([([1, 1], b), (slices, w)])
    with pytest.raises(INVALID, match=text):
        opt.compute_gradients(lambda: (0.0, [slices]), [w])

    assert not w.value.any()
    assert not b.value.any()


@pytest.mark.parametrize("value", [3.0, np.zeros(2, int)])
def test_variables_without_rows(value):
    with pytest.raises(INVALID, match="cannot"):
        hpc.SGD(1).apply_gradients(
            [(hpc.IndexedSlices([1], [0]), hpc.Variable(value, "w"))]
        )


def test_norm_is_that_of_the_whole_gradient():
    w = hpc.Variable(np.zeros((5, 2)), "w")
    indices, values = random_grads(rows=5, row=(2,))[3]
    slices = hpc.IndexedSlices(values, indices, (5, 2))
    [(clipped, _)], norm = hpc.clip_by_global_norm([(slices, w)], 1.0)

    np.testing.assert_allclose(norm, np.linalg.norm(slices.to_dense()))
    np.testing.assert_allclose(clipped.to_dense(), slices.to_dense() / norm)
    slices.values[0] = np.inf
    [(same, _)], norm = hpc.clip_by_global_norm([(slices, w)], 1.0)
    assert same is slices
    assert norm == np.inf


def resident():
    """Return the bytes of memory that this process uses."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


@pytest.mark.parametrize("rule", ["SGD", "Momentum", "AdamW"])
def test_memory_grows_with_the_rows_not_with_the_table(rule):
    # Pages that are never written to take no memory.
    table = np.zeros((4_000_000, 64), "f4")
    w, opt = hpc.Variable(table, "w"), MAKERS[rule]()
    before = resident()
    for step in range(3):
        slices = hpc.IndexedSlices(np.ones((2, 64), "f4"), [step, 3_999_999])
        opt.apply_gradients([(slices, w)])

    assert resident() - before < table.nbytes / 16
    assert (table[[0, 1, 2, -1]] < 0).all()
