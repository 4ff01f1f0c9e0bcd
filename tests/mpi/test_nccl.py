"""Reducer with schedule="nccl": sums on the devices, calls compared by MPI."""

import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    Layout,
    Reducer,
    WaitTimeoutError,
)
from hpcaccum.deadline import Deadline
from hpcaccum.device import use_device
from hpcaccum.device.nccl import NcclSum
from hpcaccum.reducer import Interruption
from hpcaccum.reducer import nccl as schedule
from tests import internals

from .expiring import missed_by
from .on_device import empty_like, to_device
from .reducing import ONES
from .reducing import SHAPES as X
from .training import check_error, meet, raised

pytestmark = [pytest.mark.usefixtures("own_card"), pytest.mark.any_size]


@pytest.fixture
def reducer(comm, keep):
    return keep(Reducer(Layout(X, "float32"), comm, schedule="nccl"))


@pytest.fixture
def sums(cp, monkeypatch):
    """How often NCCL was called to sum, after a reducer was made."""
    calls, kind = [], cp.cuda.nccl.NcclCommunicator

    class Counted(kind):
        def allReduce(self, *args):
            calls.append(args[2])
            return super().allReduce(*args)

    monkeypatch.setattr(cp.cuda.nccl, "NcclCommunicator", Counted)
    return calls


def works(cp, reducer, size):
    mine = to_device(cp, ONES)
    out = empty_like(cp, X, np.float32)
    assert reducer.reduce(mine, out=out, reduction_type="SUM", step=7) is out
    assert all((array.get() == size).all() for array in out.values())
    assert all((array.get() == 1).all() for array in mine.values())


# What it does in a call; what it computes: test_device_reducer


def test_one_communicator_and_one_sum_for_each_call(cp, comm, sums, size):
    with Reducer(Layout(X, "float32"), comm, schedule="nccl") as reducer:
        assert sums == [1]
        for _ in range(3):
            works(cp, reducer, size)
            # No rank sums anything in a call without arrays.
            assert dict(reducer.reduce({})) == {}
    assert sums == [1, 1216, 1216, 1216]


def test_it_frees_its_communicator_and_device_memory(cp, comm, monkeypatch):
    freed, kind = [], cp.cuda.nccl.NcclCommunicator
    destroy = kind.destroy

    class Watched(kind):
        def destroy(self):
            freed.append(self)
            destroy(self)

    monkeypatch.setattr(cp.cuda.nccl, "NcclCommunicator", Watched)
    reducer = Reducer(Layout(X, "float32"), comm, schedule="nccl")
    works(cp, reducer, comm.size)
    cp.get_default_memory_pool().free_all_blocks()
    before = cp.get_default_memory_pool().used_bytes()
    reducer.free()

    assert len(freed) == 1
    assert cp.get_default_memory_pool().used_bytes() <= before - 1216 * 4


@pytest.mark.ranks(min=2)
def test_ranks_that_differ_are_an_error_before_nccl(cp, sums, reducer, rank, size):
    mine = empty_like(cp, X, np.float32)
    before = len(sums)
    step = raised(reducer.reduce, mine, out=mine, step=int(rank == 0))
    part = {"x": mine["x"]} if rank == 0 else mine
    absent = raised(reducer.reduce, part, out=part)

    assert type(step) is type(absent) is DisagreementError
    assert "step must be the same" in str(step)
    assert "gradient of y must be the same" in str(absent)
    assert len(sums) == before
    assert all((array.get() == -7).all() for array in mine.values())
    works(cp, reducer, size)


@pytest.mark.ranks(min=2)
def test_a_rank_that_does_not_arrive_is_named(cp, sums, reducer, comm, rank, size):
    mine = empty_like(cp, X, np.float32)
    works(cp, reducer, size)
    before = len(sums)
    error = missed_by(size - 1, comm, reducer.reduce, mine, out=mine)

    assert len(sums) == before
    if rank != size - 1:
        assert type(error) is WaitTimeoutError
        assert f"for rank {size - 1} of {size} to make the same call" in str(error)


@pytest.mark.parametrize("own", [False, True])
def test_arrays_in_cpu_memory_are_an_error_everywhere(cp, reducer, rank, size, own):
    good, bad = empty_like(cp, X, np.float32), None
    if not own:
        bad = {name: array.get() for name, array in good.items()}
    error = raised(reducer.reduce, bad if rank == size - 1 else good)

    assert type(error) is InvalidArgumentError
    expected = "schedule 'nccl' reduces arrays on the device only, 'x' is in CPU memory"
    assert expected in str(error)
    works(cp, reducer, size)
    for each in (None, reducer.arrays()["y"], np.ones(300, np.float32)):
        with pytest.raises(InvalidArgumentError, match="'y' is in CPU memory"):
            reducer.start("y", each)
    works(cp, reducer, size)


def test_another_rank_may_fail_or_interrupt(cp, reducer, rank, size):
    mine = empty_like(cp, X, np.float32)
    for call in range(2):
        if call:
            reducer.start("y", mine["y"])
        if rank == size - 1:
            error = raised(reducer.fail, InvalidArgumentError("no"))
        else:
            error = raised(reducer.reduce, mine if not call else {"x": mine["x"]})
        check_error(error, "no")
    if rank == size - 1:
        error = raised(reducer.interrupt, "note")
    else:
        error = raised(reducer.reduce, mine)
    assert type(error) is Interruption
    works(cp, reducer, size)


def fails_to_make(comm, **options):
    return raised(Reducer, Layout(X, "float32"), comm, schedule="nccl", **options)


@pytest.mark.parametrize("connects", [False, True])
def test_nccl_that_fails_on_one_rank_is_an_error_on_all(
    cp, comm, rank, size, monkeypatch, connects
):
    class Fails(cp.cuda.nccl.NcclCommunicator):
        def __init__(self, *args):
            raise cp.cuda.nccl.NcclError(2)

    if rank == size - 1 and connects:
        monkeypatch.setattr(cp.cuda.nccl, "NcclCommunicator", Fails)
    elif rank == size - 1:
        monkeypatch.setattr(cp.cuda.nccl, "available", False)
    monkeypatch.setattr(cp.cuda.nccl, "_PATIENCE", 1.0, raising=False)
    error = fails_to_make(comm)

    expected, text = (
        (RuntimeError, "NCCL cannot connect: NCCL_ERROR_SYSTEM_ERROR")
        if connects
        else (DeviceUnavailableError, "CuPy finds no NCCL: pip install nvidia-nccl-")
    )
    check_error(error, text, kind=expected)
    assert rank == size - 1 or f"rank {size - 1}" in str(error)


@pytest.mark.ranks(min=2)
def test_ranks_that_share_a_card_are_named(comm, rank, size):
    use_device(min(rank, size - 2))
    error = fails_to_make(comm)

    assert type(error) is InvalidArgumentError
    expected = f"needs a GPU for each rank, ranks {size - 2}-{size - 1} use 0000:"
    assert expected in str(error)


def test_a_first_sum_that_is_wrong_is_an_error_on_all(cp, comm, size, monkeypatch):
    class Wrong(cp.cuda.nccl.NcclCommunicator):
        def allReduce(self, *args):
            super().allReduce(*args)
            super().allReduce(*args)

    monkeypatch.setattr(cp.cuda.nccl, "NcclCommunicator", Wrong)
    error = fails_to_make(comm)

    assert size == 1 or type(error) is RuntimeError
    assert size == 1 or f"the sum of {size} ones is {size**2}" in str(error)


@pytest.mark.ranks(min=2)
def test_a_rank_that_does_not_connect_in_time_is_named(
    cp, comm, rank, size, monkeypatch
):
    ended = threading.Event()

    class Hangs(cp.cuda.nccl.NcclCommunicator):
        def __init__(self, *args):
            ended.wait()
            raise cp.cuda.nccl.NcclError(2)

    if rank == size - 1:
        monkeypatch.setattr(cp.cuda.nccl, "NcclCommunicator", Hangs)
    monkeypatch.setattr(schedule, "Deadline", lambda _, what: Deadline(0.3, what))
    error = fails_to_make(comm)
    meet()
    ended.set()
    # The threads of the others end, too.
    monkeypatch.setattr(cp.cuda.nccl, "_PATIENCE", 0.0, raising=False)
    for thread in threading.enumerate():
        if thread.name == "hpcaccum-nccl":
            thread.join(10)

    assert type(error) is WaitTimeoutError
    # The others wait for it, inside NCCL.
    assert "to connect by NCCL" in str(error)
    assert "schedule 'nccl': connecting: waited" in str(error)


# To queue a sum fails at once, or the sum fails later, which the next call notices.
@pytest.mark.parametrize(
    ("method", "number", "text"),
    [("__call__", 1, "UNHANDLED_CUDA_ERROR"), ("check", 2, "SYSTEM_ERROR")],
)
def test_a_sum_that_fails_on_one_rank_is_an_error_on_all(
    cp, reducer, rank, size, monkeypatch, method, number, text
):
    def fails(self, *args):
        raise cp.cuda.nccl.NcclError(number)

    works(cp, reducer, size)
    mine = empty_like(cp, X, np.float32)
    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setattr(NcclSum, method, fails)
        error = raised(reducer.reduce, mine, out=mine)

    check_error(error, f"NCCL has failed: NCCL_ERROR_{text}", kind=RuntimeError)
    assert rank == size - 1 or f"rank {size - 1}" in str(error)
    mine = empty_like(cp, X, np.float32)
    again = raised(reducer.reduce, mine, out=mine)
    check_error(again, "NCCL has failed: ", "make a new reducer", kind=RuntimeError)
    # The device of no rank waits for another.
    assert (mine["x"].get() == -7).all()


TABLES = {"w": (300, 7), "b": (), "none": (0,)}


def gradients(rank, step):
    # Their sums are exact in any order.
    rng = np.random.default_rng([rank, step])
    return {
        name: rng.integers(-64, 65, shape).astype(np.float32)
        for name, shape in TABLES.items()
    }


def trained(cp, comm, **options):
    """Return an optimizer and its variables, on the device unless ``cp`` is NumPy."""
    variables = [
        hpc.Variable(cp.zeros(shape, np.float32), name)
        for name, shape in TABLES.items()
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
        opt, variables = trained(library, comm, **options)
        for step in range(3):
            if scenario == "leaves" and (rank, step) == (size - 1, 2):
                opt.leave()
                break
            own = gradients(rank, step)
            if scenario == "drops" and rank == size - 1:
                own["b"][...] = np.nan
            grads = [library.asarray(own[var.name]) for var in variables]
            opt.apply_gradients(zip(grads, variables, strict=True))
        used = internals.reducer(opt).statistics().schedule
        assert (used == "nccl") == (options.get("schedule") == "nccl")
        opt.free()
        results.append([opt.center(variables), opt.global_step, opt.statistics()])
    for found, wanted in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(found, wanted, 1e-6)
    assert results[0][1:] == results[1][1:]
