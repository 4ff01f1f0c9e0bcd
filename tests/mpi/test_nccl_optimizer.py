"""CrossShardOptimizer with schedule="nccl": as with the schedules of CPU memory."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc

from .training import raised

pytestmark = [pytest.mark.usefixtures("own_card"), pytest.mark.any_size]

SHAPES = {"w": (300, 7), "b": (), "none": (0,)}


def gradients(rank, step):
    # Their sums are exact in any order.
    rng = np.random.default_rng([rank, step])
    return {
        name: rng.integers(-64, 65, shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def made(cp, comm, **options):
    """Return an optimizer and its variables, on the device unless ``cp`` is NumPy."""
    variables = [
        hpc.Variable(cp.zeros(shape, np.float32), name)
        for name, shape in SHAPES.items()
    ]
    opt = hpc.CrossShardOptimizer(hpc.Momentum(0.5, 0.5), comm=comm, **options)
    opt.initialize(variables)
    return opt, variables


@pytest.mark.parametrize("reduction", [hpc.Reduction.MEAN, hpc.Reduction.SUM])
@pytest.mark.parametrize("scenario", ["all", "leaves", "drops"])
def test_updates_are_those_of_cpu_memory(cp, comm, rank, size, reduction, scenario):
    results = []
    for library, options in ((cp, {"schedule": "nccl"}), (np, {})):
        options |= {"reduction": reduction, "on_nonfinite": "drop"}
        opt, variables = made(library, comm, **options)
        for step in range(3):
            if scenario == "leaves" and (rank, step) == (size - 1, 2):
                opt.leave()
                break
            own = gradients(rank, step)
            if scenario == "drops" and rank == size - 1:
                own["b"][...] = np.nan
            grads = [library.asarray(own[var.name]) for var in variables]
            opt.apply_gradients(zip(grads, variables, strict=True))
        used = opt._shard.reducer.statistics().schedule
        assert (used == "nccl") == (options.get("schedule") == "nccl")
        opt.free()
        results.append([opt.center(variables), opt.global_step, opt.statistics()])
    for found, wanted in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(found, wanted, 1e-6)
    assert results[0][1:] == results[1][1:]


def test_variables_in_cpu_memory_are_an_error_on_all(comm, rank):
    opt, variables = made(np, comm, schedule="nccl")
    grads = [gradients(rank, 0)[var.name] for var in variables]
    pairs = list(zip(grads, variables, strict=True))
    error = raised(opt.apply_gradients, pairs)
    opt.free()

    assert type(error) is hpc.InvalidArgumentError
    assert "reduces arrays on the device only" in str(error)
    assert not variables[0].value.any()
