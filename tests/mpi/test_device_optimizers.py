"""Optimizers of variables on a device: the same results as in CPU memory."""

import gc

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError
from tests import internals

from ..common import check_error
from .on_device import FEW_RANKS, Aware
from .support import meet
from .training import WRAPPERS, diloco, gives, raised, started, turns

pytestmark = [FEW_RANKS, pytest.mark.any_size]

SHAPES = {"w": (40, 5), "b": (5,), "none": (0,)}


def arrays(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in SHAPES.values()]


def variables(place, seed=0, dtype=np.float32):
    values = zip(SHAPES, arrays(seed, dtype), strict=True)
    return [hpc.Variable(place(value), name) for name, value in values]


WITH_LOCAL_STEPS = {
    **WRAPPERS,
    "LocalSteps": lambda *args: diloco(*args, quorum=args[2].size),
    # The second and the fourth of five steps push; the next one takes the answer.
    "fragments": lambda *args: diloco(
        *args, 4, quorum=args[2].size, fragments=2, overlap=1
    ),
}


@pytest.mark.parametrize("wrapper", WITH_LOCAL_STEPS)
@pytest.mark.parametrize("rule", [hpc.SGD, hpc.Adam])
def test_wrappers_do_the_same(cp, comm, rank, size, wrapper, rule):
    # All ranks contribute the same gradients, in turns if each makes an update.
    found = []
    for place in (np.array, cp.asarray):
        own = variables(place)
        opt = started(WITH_LOCAL_STEPS[wrapper](rule(0.1), own, comm), own)
        for step in range(5):
            grads = [place(grad) for grad in arrays(step + 1)]
            if wrapper in ("DropStale", "AGN"):
                turns(range(size), lambda _, o=opt, g=grads: o.minimize(gives(*g)).lag)
            else:
                opt.minimize(gives(*grads))
        meet()
        found.append(opt.center(own))
        opt.free()
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


@pytest.mark.parametrize("wrapper", WITH_LOCAL_STEPS)
def test_free_gives_the_memory_of_the_device_back(cp, pinned, comm, wrapper):
    own, pool = variables(cp.asarray), cp.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    opt = started(WITH_LOCAL_STEPS[wrapper](hpc.SGD(0.1), own, comm), own)
    for number in range(6):
        with cp.cuda.Stream(non_blocking=True):
            for array in (grads := opt.gradient_arrays()).values():
                array.fill(number)
            opt.minimize(lambda grads=grads: (0.0, grads))
        meet()
        del array, grads
    opt.free()

    assert pool.used_bytes() == before
    assert not pinned


def bits(arrays):
    host = [array.get() if hasattr(array, "get") else array for array in arrays]
    return [(str(array.dtype), array.tobytes()) for array in host]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_all_ranks_begin_and_end_alike(cp, comm, rank, size, wrapper):
    own, start = variables(cp.asarray, rank, np.float16), bits(arrays(0, np.float16))
    with WRAPPERS[wrapper](hpc.SGD(0.1), own, comm, on_nonfinite="drop") as opt:
        opt.initialize(own)
        if wrapper == "AGN":
            opt.get_init_op(rank)()
        grads = [cp.asarray(grad) for grad in arrays(1, np.float16)]
        grads[1][3] = -np.inf
        receipt = opt.minimize(gives(*grads))
        meet()
        assert receipt.reason == "nonfinite"
        assert opt.statistics().nonfinite == (1,) * size
        assert bits(var.value for var in own) == bits(opt.center(own)) == start
        meet()
        grads[1][3] = 1
        for _ in range(2 * rank + 2):
            opt.minimize(gives(*grads))
        opt.leave()
    found = bits(var.value for var in own)

    assert found == bits(opt.center(own)) != start
    assert meet(found) == [found] * size


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("wrapper", ["DropStale", "AGN"])
def test_parameters_are_those_of_one_step(cp, pinned, comm, rank, size, wrapper):
    w = hpc.Variable(cp.zeros(500), "w")
    with started(WRAPPERS[wrapper](hpc.SGD(1), [w], comm), [w]) as opt:
        for _ in range(4):
            meet()
            opt.minimize(gives(cp.full(500, -1.0)))
            seen = opt.center(w)
            meet()
            # The other ranks make updates before rank 1 reads what it pulled.
            for _ in range(2 * (rank != 1)):
                opt.minimize(gives(cp.full(500, -1.0)))
            meet()
            found = w.value.get()
            assert (found == found[0]).all()
            if rank == 1 and wrapper == "DropStale":
                assert found[0] <= seen[0]


def test_gradients_go_by_mpi_where_that_is_asked_for(cp, aware, comm, rank, size):
    w = hpc.Variable(cp.zeros(500), "w")
    with hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm, cuda_aware=True) as opt:
        opt.initialize([w])
        reducer = internals.reducer(opt)
        taken = Aware.of(reducer)
        for _ in range(2):
            opt.minimize(gives(cp.full(500, float(rank))))
        assert reducer.statistics().schedule == "flat"
        assert taken.given == 2
        assert not reducer.arrays()["w"].any()
    assert (w.value.get() == 1 - size).all()


@pytest.mark.ranks(min=2)
def test_variables_that_begin_unlike_are_found(cp, comm, rank, size):
    w = hpc.Variable(cp.full((5,), float(rank == size - 1)), "w")
    with hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm, sync=False) as opt:
        error = raised(opt.initialize, [w])
        w.value.fill(3)
        opt.initialize([w])
    assert type(error) is hpc.DisagreementError


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_variables_are_all_here_or_all_there(cp, comm, rank, size, wrapper):
    here = hpc.Variable(np.zeros(5), "here")
    other = (cp.zeros if rank == size - 1 else np.zeros)(5)
    both = [here, hpc.Variable(other, "there")]
    opt = WRAPPERS[wrapper](hpc.SGD(1), both, comm)
    error = raised(opt.initialize, both)
    meet()
    opt.free()

    check_error(error, "some on the host")


@pytest.mark.ranks(min=2)
def test_parameters_are_not_pulled_on_another_device(cp, comm, rank, monkeypatch):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    w, before = hpc.Variable(cp.zeros(500), "w"), cp.cuda.Device().id
    grad, losses = cp.ones(500), []
    with started(WRAPPERS["DropStale"](hpc.SGD(1), [w], comm), [w]) as opt:
        opt.minimize(gives(grad))
        meet()
        if rank:
            opt.minimize(gives(grad))
        meet()
        if rank == 0:
            with cp.cuda.Device(1 - before):
                error = raised(opt.minimize, lambda: losses.append(1) or (0.0, [grad]))
            text = f"is on device {before}, the current one is {1 - before}"
            assert text in str(error)
            assert not losses
        opt.minimize(gives(grad))


def test_a_gradient_is_where_its_variable_is(cp):
    here, there = hpc.Variable(np.zeros(5), "w"), hpc.Variable(cp.zeros(5), "w")
    for var, grad, message in (
        (here, cp.ones(5), "is on the device, the variable is not"),
        (there, np.ones(5), "is in host memory, the variable is not"),
        (there, cp.ones(10)[::2], "contiguous"),
        (there, cp.ones(5, np.int32), "got int32"),
    ):
        check_error(raised(hpc.SGD(1).apply_gradients, [(grad, var)]), message)
        assert not var.value.any()
    assert type(raised(hpc.Variable, cp.ones(10)[::2])) is InvalidArgumentError
    assert type(raised(hpc.Variable, cp.ones(5, np.int32))) is InvalidArgumentError


def test_a_variable_of_the_device(cp):
    w = hpc.Variable(cp.zeros((2, 3), np.float32), "w")
    array = w.value
    w.value = np.ones((2, 3))
    w.value += 1

    assert w.value is array
    assert repr(w) == "Variable('w', float32 (2, 3), [[2. 2. 2.]\n [2. 2. 2.]])"
