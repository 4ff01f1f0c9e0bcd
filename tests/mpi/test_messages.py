"""Errors of one rank: the message on the other ranks begins with each name once."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.mpi import group_of

from .acting import meet
from .training import WRAPPERS, gives, raised, variable

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.any_size]


def check(error, start):
    """Check what the last rank, and then what the others have raised."""
    *others, own = meet(str(error))
    name = start.partition(":")[0]
    assert own.count(f"{name}: ") <= 1
    for text in others:
        where = f"rank {len(others)}"
        assert text.startswith((f"{start}: {where}: ", f"{start}: {where} has left"))
        assert text.count(name) == text.count(where) == 1
        assert text.endswith(own.removeprefix(f"{name}: "))


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("x must be 1", "x must be 1"),
        ("mine: x must be 1", "x must be 1"),
        ("mine: a: x: 1", "x: 1"),
        ("mine: b: x: 1", "b: x: 1"),
        ("mine, too", "mine, too"),
        ("a: x", "a: x"),
    ],
)
def test_parts_of_an_error_that_the_call_has_too(comm, rank, size, text, rest):
    failure = hpc.InvalidArgumentError(text) if rank == size - 1 else None
    error = raised(group_of(comm).raise_together, "mine: a", failure)

    own = rank == size - 1
    assert str(error) == (text if own else f"mine: a: rank {size - 1}: {rest}")


@pytest.mark.parametrize("inner", [7, hpc.SGD])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_no_optimizer(comm, rank, size, wrapper, inner):
    mine = inner if rank == size - 1 else hpc.SGD(1)
    error = raised(WRAPPERS[wrapper], mine, [variable()], comm)

    with WRAPPERS[wrapper](hpc.SGD(1), [variable()], comm) as opt:
        check(error, type(opt).__name__)


@pytest.mark.parametrize("initialized", [True, False])
def test_a_gradient_that_is_not_finite(comm, rank, size, initialized):
    w, start = variable(), "mine" if initialized else "mine: initialize"
    with hpc.CrossShardOptimizer(
        hpc.SGD(1), name="mine", on_nonfinite="raise", comm=comm
    ) as opt:
        if initialized:
            opt.initialize([w])
        bad = np.nan if rank == size - 1 else 1.0
        check(raised(opt.apply_gradients, [(bad, w)]), start)


def test_a_rank_that_has_left(comm, rank, size):
    w = variable()
    with hpc.CrossShardOptimizer(hpc.SGD(1), name="mine", comm=comm) as opt:
        opt.minimize(gives(1.0), var_list=[w])
        snapshot = opt.snapshot()
        if rank == size - 1:
            opt.leave()
        else:
            opt.minimize(gives(1.0))
        check(raised(opt.restore, snapshot), "mine: restore")
