"""CrossShardOptimizer against plain NumPy: random steps, with errors of one rank."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import Reduction
from hpcaccum.rows import exchange as row_exchange

from .training import gives, meet, raised

STEPS = 12
SHAPES = [(), (0, 3), (3,), (70, 2), (300, 0), (40, 5, 2)]
ERRORS = ["none", "index", "shape", "mask", "rate", "computed"]


def drawn_variables(random):
    shapes = [SHAPES[i] for i in random.integers(len(SHAPES), size=4)]
    return [
        hpc.Variable(
            np.zeros(shape, random.choice(["f4", "f8"])),
            f"v{number}",
            sparse=bool(shape and random.integers(2)),
        )
        for number, shape in enumerate(shapes)
    ]


def drawn_gradient(random, var):
    """Return a gradient, and the same as a whole array. Sums of such are exact."""
    whole = np.zeros(var.shape)
    if not var.sparse:
        whole[...] = 12 * random.integers(-3, 4, var.shape)
        return whole.astype(random.choice(["f2", "f4", "f8", "i4"])), whole
    rows = len(whole)
    number = random.choice([0, 1, rows // 2, 2 * rows]) if rows else 0
    indices = random.integers(0, max(rows, 1), number)
    values = 12.0 * random.integers(-3, 4, (number, *var.shape[1:]))
    np.add.at(whole, indices, values)
    values = values.astype(random.choice(["f2", "f4", "f8"]))
    return hpc.IndexedSlices(values, indices.astype(random.choice(["i4", "i8"]))), whole


def spoil(opt, pairs, error):
    """Make this rank's part of a step wrong."""
    _, var = pairs[0]
    wrong = {
        "none": None,
        "index": hpc.IndexedSlices(np.ones((1, *var.shape[1:])), [-1]),
        "shape": np.ones((7, 7, 7)),
        "mask": np.ma.ones(var.shape),
    }
    if error in wrong:
        pairs[0] = wrong[error], var
    elif error == "rate":
        opt.learning_rate = 8.0
    else:
        opt.compute_gradients(gives(None), var_list=[var])


def overwrite(pairs):
    """Change the gradients, as a caller may after a step."""
    for grad, _ in pairs:
        for array in getattr(grad, "values", grad), getattr(grad, "indices", None):
            if isinstance(array, np.ndarray):
                array[...] = 0


def check_random_steps(group, seed, reduction):
    random = np.random.default_rng(seed)
    variables = drawn_variables(random)
    model = {var.name: np.zeros(var.shape) for var in variables}
    with hpc.CrossShardOptimizer(hpc.SGD(1.0), reduction, comm=group) as opt:
        opt.initialize(variables)
        for _ in range(STEPS):
            rate = float(random.choice([0.25, 0.5]))
            used = [var for var in variables if random.integers(4)] or variables
            one, error = random.integers(2 * group.size), random.choice(ERRORS)
            opt.learning_rate = rate
            for rank in range(group.size):
                found = [drawn_gradient(random, var) for var in used]
                order = random.permutation(len(used))
                if rank == group.rank:
                    mine = [(found[i][0], used[i]) for i in order]
                if one >= group.size or group.size == 1:
                    mean = group.size if reduction == Reduction.MEAN else 1
                    for var, (_, whole) in zip(used, found, strict=True):
                        model[var.name] -= rate * whole / mean
            if one == group.rank and group.size > 1:
                spoil(opt, mine, error)
            grads, order = zip(*mine, strict=True)
            result = raised(opt.minimize, gives(*grads), var_list=order)
            if one < group.size and group.size > 1:
                assert isinstance(result, (ValueError, TypeError)), (error, result)
            else:
                assert isinstance(result, hpc.Receipt), result
            overwrite(mine)
            for var in variables:
                np.testing.assert_allclose(var.value, model[var.name], 1e-6, 1e-5)
    assert len(set(meet(b"".join(var.value.tobytes() for var in variables)))) == 1


@pytest.mark.parametrize(
    ("seed", "most", "reduction"),
    [
        (0, 0, Reduction.MEAN),
        (1, 512, Reduction.SUM),
        (2, 1 << 19, Reduction.MEAN),
        (3, 0, Reduction.SUM),
        (0, 512, Reduction.MEAN),
        (1, 1 << 19, Reduction.SUM),
    ],
)
def test_random_steps(comm, seed, reduction, most, monkeypatch):
    monkeypatch.setattr(row_exchange, "_MOST_BYTES", most)
    check_random_steps(hpc.group_of(comm), seed, reduction)


@pytest.mark.parametrize(
    ("seed", "reduction"),
    [(4, Reduction.MEAN), (5, Reduction.SUM), (6, Reduction.MEAN)],
)
def test_random_steps_on_nodes(group, seed, reduction):
    check_random_steps(group, seed, reduction)
