"""After `free` of a one-sided optimizer, all ranks have the final center."""

import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from .acting import until
from .reducing import made_up
from .training import ONE_SIDED, WRAPPERS, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size


@pytest.fixture(params=ONE_SIDED)
def kind(request):
    return request.param


def bits(*arrays):
    return [(str(array.dtype), array.tobytes()) for array in arrays]


def same_everywhere(*arrays):
    """Whether all ranks have these bits. Collective."""
    mine = bits(*arrays)
    return all(theirs == mine for theirs in meet(mine))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_uneven_loops_end_with_the_same_variables(comm, kind, rank, size, dtype):
    rng = np.random.default_rng(rank)
    w = variable(np.full(5, rank), dtype, "w")
    never = variable([float(rank)], np.float32, "never")
    # Rank 0 leaves early; it may have the server, or not.
    host = size - 1 if dtype == np.float32 else 0
    with ONE_SIDED[kind](hpc.Momentum(0.1, 0.5), [w, never], comm, host=host) as opt:
        opt.initialize([w, never])
        for _ in range(2 * rank + 1):
            opt.minimize(gives(rng.normal(size=5).astype(dtype), None))
        if rank == 0:
            opt.leave()

    assert same_everywhere(w.value, never.value)
    assert never.value == host
    assert bits(opt.center(w), opt.center(never)) == bits(w.value, never.value)


@pytest.mark.parametrize("options", [{}, {"dedicated": True}, {"servers": [0, 1]}])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_global_step_ends_with_one_value(comm, kind, options, rank, size):
    if kind == "CrossShard" and options:
        pytest.skip("it has no server")
    if size == 1 and options:
        pytest.skip("it needs 2 ranks")
    if "servers" in options:
        comm = made_up(comm, "apart")
    w = variable(np.zeros(8))
    # An update counts, whatever the variable has been before; some never pass theirs.
    step = hpc.Variable(np.int64(5 * rank), "trained")
    unlike = hpc.Variable(np.int64(7), "unlike")
    with started(WRAPPERS[kind](hpc.SGD(0.1), [w], comm, **options), [w]) as opt:
        serves = rank == 0 and "dedicated" in options
        for _ in range(0 if serves else 4 + 2 * (rank == size - 1)):
            opt.minimize(gives(np.ones(8)), step if rank == size - 1 else None)
            if kind == "CrossShard" and opt.global_step == 4 and rank < size - 1:
                opt.leave()

    assert opt.global_step > 0
    assert step.value == opt.global_step
    assert len(set(meet(int(step.value)))) == 1
    assert unlike.value == 7


def test_the_final_state_can_be_read_after_free(comm, kind, rank, size):
    w = variable(np.zeros(3))
    opt = started(ONE_SIDED[kind](hpc.Momentum(1, 0.5), [w], comm), [w])
    for _ in range(2):
        opt.minimize(gives(np.ones(3)))
    opt.free()
    w.value[...] = 7
    opt.free()
    final = opt.global_step, opt.statistics(), bits(opt.center(w), *opt.center([w]))
    opt.center(w)[...] = 9
    slot = opt.get_slot(w, "momentum")

    assert all(each == final for each in meet(final))
    assert (w.value == 7).all()
    assert final[0] == sum(final[1].accepted) // (size if kind == "SyncReplicas" else 1)
    assert (opt.center(w) < 0).all()
    assert bits(opt.center(w)) == final[2][:1]
    if kind == "DropStale":
        assert opt.stale_counter == 0
    if rank == 0 or kind == "AGN":
        assert (slot.value > 0).all()
    assert type(raised(opt.gradient_arrays)) is hpc.FreedError


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dedicated", [False, True], ids=["beside", "dedicated"])
def test_a_rate_may_ask_for_the_step_to_the_last_update(comm, kind, rank, dedicated):
    seen = []

    def rate():
        seen.append((opt.global_step, sum(opt.statistics().dropped)))
        return 1.0

    w = variable()
    opt = started(ONE_SIDED[kind](hpc.SGD(rate), [w], comm, dedicated=dedicated), [w])
    meet()
    if rank == 0 and dedicated:
        opt.serve()
    elif rank > 0:
        if not dedicated:
            # The host has called free() by now.
            until(lambda: 0 in internals.left(opt))
        for _ in range(4):
            opt.minimize(gives(1.0))
    opt.free()

    assert w.value == -opt.global_step
    steps = [step for step, _ in seen]
    # Ranks make local steps with AGN.
    if rank == 0 or kind != "AGN":
        assert steps == [*range(opt.global_step)] * (rank == 0)
