"""Arrays that outlive the object they came from: valid, and used by nothing else."""

import gc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import hpcaccum as hpc

from .support import WAIT
from .training import WRAPPERS, gives, meet, started, variable

pytestmark = pytest.mark.any_size

# Allocators return the memory of large arrays to the system immediately.
LARGE = 1 << 17


def accumulator(comm, storage):
    acc = hpc.ConditionalAccumulator("f8", (LARGE,), comm=comm, storage=storage)
    with acc:
        first = acc.slot()
        first[:] = 1
        acc.apply_grad(first)
        meet()
        if comm.rank == 0:
            acc.take_grad(comm.size, timeout=WAIT)
        meet()
        return acc, [first, acc.slot()]


def reducer(comm, size=LARGE, **options):
    with hpc.Reducer(hpc.Layout({"x": (size,)}, "f4"), comm, **options) as reducer:
        arrays, results = reducer.arrays(), reducer.results()
        arrays["x"][:] = 1
        reducer.reduce()
    assert (results["x"] == 1).all()
    return reducer, [arrays["x"], results["x"]]


def optimizer(comm, kind):
    var = variable(np.zeros(LARGE))
    with started(WRAPPERS[kind](hpc.Momentum(1, 0.5), [var], comm), [var]) as optimizer:
        first = optimizer.gradient_arrays()["w"]
        first[:] = 1
        optimizer.minimize(gives(first))
        return optimizer, [first, optimizer.gradient_arrays()["w"]]


HOLDERS = {
    "slots": partial(accumulator, storage="slots"),
    "sum": partial(accumulator, storage="sum"),
    "eager": partial(reducer, size=100),
    "auto": reducer,
    "hierarchical": partial(reducer, schedule="hierarchical"),
    "flat": partial(reducer, schedule="flat"),
    **{kind: partial(optimizer, kind=kind) for kind in WRAPPERS},
}


def mapped():
    """Return how many bytes of node memory this rank has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ours = [line.split()[0].split("-") for line in lines if "/hpcaccum-" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ours)


@pytest.mark.parametrize("kind", HOLDERS)
def test_arrays_outlive_their_object_and_then_their_memory_is_released(comm, kind):
    gc.collect()
    before = mapped()
    freed, held = HOLDERS[kind](comm)
    meet()
    for array in held:
        if array.flags.writeable:
            array[:] = 5
            assert (array == 5).all()
        else:
            assert np.isfinite(array).all()
    # That memory is in use by no other object.
    with hpc.ConditionalAccumulator("f8", (LARGE,), comm=comm) as other:
        assert not other.slot().any()
    del array, held
    gc.collect()

    assert mapped() == before
    del freed
