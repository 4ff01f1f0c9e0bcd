"""Reducer with device arrays: the same results, with all necessary waits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import (
    DeviceUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    WaitTimeoutError,
)
from hpcaccum.device import kernels
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi.job import runtime
from hpcaccum.reducer import device as device_exchange

from .expiring import times_out_without
from .on_device import FEW_RANKS, Aware, empty_like, to_device
from .reducing import (
    ALL,
    EACH,
    KINDS,
    Maker,
    drawn,
    maker_fixture,  # noqa: F401
    works,
)
from .training import meet, raised

pytestmark = [FEW_RANKS, pytest.mark.any_size]

SHAPES = {"scalar": (), "empty": (0,), "vector": (2330,), "matrix": (15, 117)}
DTYPES = ["float32", "float16", ml_dtypes.bfloat16, "float64"]


@pytest.fixture(autouse=True)
def all_pinned(monkeypatch):
    # Copies to memory that is not pinned always wait.
    monkeypatch.setattr(device_exchange, "_PIN", 0)


def contributions(dtype, size, call):
    return [drawn(SHAPES, rank, call, dtype=dtype) for rank in range(size)]


def check(maker, found, parts, dtype, **options):
    for name, array in found.items():
        expected = maker.expected([part[name] for part in parts], dtype, **options)
        maker.check(array.get() if hasattr(array, "get") else array, expected)


@pytest.mark.parametrize(
    ("maker", "dtype"),
    [*((kind, "float32") for kind in KINDS), *zip(KINDS, DTYPES[1:], strict=False)],
    indirect=["maker"],
    ids=str,
)
def test_out_of_the_device_and_back(cp, maker, rank, size, dtype):
    reducer, wide = maker(SHAPES, dtype), accumulation_dtype(np.dtype(dtype))
    for call in range(3):
        parts = contributions(dtype, size, call)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, wide)
        found = reducer.reduce(mine, out=out)

        assert found is out
        check(maker, out, parts, dtype)
        for name, array in mine.items():
            assert array.get().tobytes() == parts[rank][name].tobytes()


@ALL
def test_results_may_replace_the_inputs(cp, maker, rank, size):
    reducer, parts = maker(SHAPES), contributions(np.float32, size, 0)
    mine = to_device(cp, parts[rank])
    reducer.reduce(mine, out=mine)

    check(maker, mine, parts, np.float32)


@ALL
def test_inputs_and_results_of_any_float_dtype(cp, maker, size):
    reducer = maker(SHAPES)
    for dtype in ("float16", "float64"):
        ones = {n: np.ones(shape, dtype) for n, shape in SHAPES.items()}
        out = empty_like(cp, SHAPES, dtype)
        reducer.reduce(to_device(cp, ones), out=out, reduction_type="SUM")

        assert all(a.dtype == dtype and (a.get() == size).all() for a in out.values())


@ALL
def test_from_the_device_to_cpu_memory(cp, maker, rank, size):
    reducer, parts = maker(SHAPES), contributions(np.float32, size, 0)
    found = reducer.reduce(to_device(cp, parts[rank]))
    check(maker, found, parts, np.float32)
    out = {name: np.full(shape, -7, np.float32) for name, shape in SHAPES.items()}
    reducer.reduce(to_device(cp, parts[rank]), out=out, step=1)
    check(maker, out, parts, np.float32)


@ALL
def test_from_cpu_memory_to_the_device(cp, maker, rank, size):
    reducer, parts = maker(SHAPES), contributions(np.float32, size, 0)
    out = empty_like(cp, SHAPES, np.float32)
    reducer.reduce(parts[rank], out=out)

    check(maker, out, parts, np.float32)


@ALL
def test_some_ranks_may_have_none(cp, maker, rank, size):
    reducer = maker(SHAPES)
    for call in range(2):
        parts, out = contributions(np.float32, size, call), None
        mine = parts[rank]
        if rank % 2 == call:
            mine, out = to_device(cp, mine), empty_like(cp, SHAPES, np.float32)
        check(maker, reducer.reduce(mine, out=out), parts, np.float32)


@ALL
def test_arrays_are_started_one_by_one(cp, maker, rank, size):
    reducer = maker(SHAPES)
    for call in range(2):
        parts = contributions(np.float32, size, call)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        for name in reversed(mine):
            reducer.start(name, mine[name])
        reducer.wait(out=out)
        check(maker, out, parts, np.float32)


@ALL
def test_on_streams_of_the_callers(cp, maker, rank, size):
    reducer = maker(SHAPES)
    for call in range(4):
        parts = contributions(np.float32, size, call)
        with cp.cuda.Stream(non_blocking=True):
            mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
            for array in mine.values():
                array *= 2
            reducer.reduce(mine, out=out)
            for array in (*mine.values(), *out.values()):
                array /= 2
            check(maker, out, parts, np.float32)


@ALL
def test_streams_may_change_from_call_to_call(cp, maker, rank, size):
    reducer, outs, streams = maker(SHAPES), [], []
    for call in range(4):
        streams.append(cp.cuda.Stream(non_blocking=True))
        with streams[-1]:
            mine = to_device(cp, contributions(np.float32, size, call)[rank])
            outs.append(reducer.reduce(mine, out=empty_like(cp, SHAPES, np.float32)))
    cp.cuda.Device().synchronize()
    for call, out in enumerate(outs):
        check(maker, out, contributions(np.float32, size, call), np.float32)


# A CUDA-aware MPI

FLAT = pytest.mark.parametrize("maker", ["flat"], indirect=True)


@FLAT
@pytest.mark.parametrize(
    ("dtype", "kind"), [*zip(DTYPES, 2 * ["MEAN", "SUM"], strict=True)], ids=str
)
def test_an_mpi_that_takes_device_memory_gets_it(
    cp, aware, maker, rank, size, dtype, kind
):
    reducer = maker(SHAPES, dtype, cuda_aware=True, reduction_type=kind)
    comm, buckets = Aware.of(reducer), reducer.statistics().buckets
    wide = accumulation_dtype(np.dtype(dtype))
    for call in range(3):
        parts = contributions(dtype, size, call)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, wide)
        reducer.reduce(mine, out=out)
        check(maker, out, parts, dtype, mean=kind == "MEAN")
        assert comm.given == (call + 1) * buckets
    assert not any(array.any() for array in reducer.arrays().values())
    parts = contributions(dtype, size, 3)
    found = reducer.reduce(to_device(cp, parts[rank]))
    check(maker, found, parts, dtype, mean=kind == "MEAN")


@FLAT
def test_an_mpi_that_takes_device_memory_is_not_given_it_unasked(
    cp, aware, maker, rank, size
):
    reducer, parts = maker(SHAPES), contributions(np.float32, size, 0)
    comm, out = Aware.of(reducer), empty_like(cp, SHAPES, np.float32)
    reducer.reduce(to_device(cp, parts[rank]), out=out)

    check(maker, out, parts, np.float32)
    assert not comm.given


@FLAT
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_ranks_without_a_device_take_part(cp, aware, maker, rank, size, dtype):
    reducer = maker(SHAPES, dtype, cuda_aware=True)
    Aware.of(reducer)
    for call in range(4):
        parts = contributions(dtype, size, call)
        mine, out = parts[rank], None
        if (rank + call) % 2:
            mine, out = to_device(cp, mine), empty_like(cp, SHAPES, np.float32)
        check(maker, reducer.reduce(mine, out=out), parts, dtype)


@FLAT
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_started_arrays_may_also_be_given_to_that_mpi(
    cp, aware, maker, rank, size, dtype
):
    reducer = maker(SHAPES, dtype, cuda_aware=True)
    Aware.of(reducer)
    for call in range(4):
        parts = contributions(dtype, size, call)
        mine = parts[rank] if (rank + call) % 2 else to_device(cp, parts[rank])
        out = empty_like(cp, SHAPES, np.float32)
        for name in mine if call else list(mine)[:2]:
            reducer.start(name, mine[name])
        rest = {} if call else {n: mine[n] for n in list(mine)[2:]}
        check(maker, reducer.reduce(rest, out=out), parts, dtype)


@FLAT
@pytest.mark.ranks(min=2)
def test_no_rank_enters_a_blocking_call_before_all_have_arrived(
    cp, comm, aware, maker, rank, size
):
    reducer = maker({"x": (900,)}, cuda_aware=True)
    given, mine = Aware.of(reducer), {"x": cp.ones(900, np.float32)}
    reducer.reduce(mine, out=mine)
    before, error = given.given, None
    with times_out_without(comm, size - 1):
        if rank != size - 1:
            error = raised(reducer.reduce, mine, out=mine)
    meet()

    assert given.given == before
    if rank != size - 1:
        assert type(error) is WaitTimeoutError
        assert f"for rank {size - 1} of {size} to make the same call" in str(error)


@FLAT
@pytest.mark.ranks(min=2)
def test_no_rank_enters_a_blocking_call_with_another_step(cp, aware, maker, rank, size):
    reducer = maker({"x": (900,), "y": (300,)}, cuda_aware=True)
    comm = Aware.of(reducer)
    mine = empty_like(cp, {"x": (900,), "y": (300,)}, np.float32)
    with pytest.raises(DisagreementError):
        reducer.reduce(mine, out=mine, step=int(rank == 0))

    assert not comm.given
    assert all((array.get() == -7).all() for array in mine.values())
    works(reducer, size)


@pytest.mark.parametrize("kind", ["flat", "shared", "hierarchical"])
def test_an_mpi_that_does_not_take_it_never_gets_it(cp, monkeypatch, comm, kind):
    monkeypatch.setenv(runtime.VARIABLE, "0")
    runtime.cuda_awareness.cache_clear()
    maker = Maker(comm, kind)
    error = raised(maker, SHAPES, cuda_aware=True)
    maker.free()
    runtime.cuda_awareness.cache_clear()

    assert type(error) is InvalidArgumentError
    expected = "HPCACCUM_CUDA_AWARE=0" if kind == "flat" else "for schedule 'flat'"
    assert expected in str(error)


def test_values_of_the_variable(monkeypatch):
    monkeypatch.setenv(runtime.VARIABLE, "yes")
    runtime.cuda_awareness.cache_clear()
    with pytest.raises(InvalidArgumentError, match="must be 0 or 1, got 'yes'"):
        runtime.cuda_awareness()
    monkeypatch.delenv(runtime.VARIABLE)
    assert runtime.cuda_awareness().reason


# Errors on one rank


@EACH
def test_another_device_on_one_rank_is_an_error_on_all(
    cp, maker, rank, size, monkeypatch
):
    monkeypatch.setenv("CUPY_SIMULATOR_DEVICES", "2")
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    shapes, before = {"x": (900,), "y": (300,)}, cp.cuda.Device().id
    reducer = maker(shapes)
    reducer.reduce(empty_like(cp, shapes, np.float32))
    with cp.cuda.Device(before if rank else 1 - before):
        mine = empty_like(cp, shapes, np.float32)
        error = raised(reducer.reduce, mine)
    assert type(error) is InvalidArgumentError
    assert f"is on device {before}, the current one is {1 - before}" in str(error)
    works(reducer, size)


@EACH
@pytest.mark.parametrize("where", ["inputs", "out"])
def test_a_device_that_fails_on_one_rank_is_an_error_on_all(
    cp, maker, rank, size, where, monkeypatch
):
    def fails(name):
        raise DeviceUnavailableError("no compiler")

    reducer = maker({"x": (900,), "y": (300,)})
    mine = empty_like(cp, {"x": (900,), "y": (300,)}, np.float32)
    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setattr(kernels, "kernel", fails)
        arrays, out = (mine, None) if where == "inputs" else (None, mine)
        error = raised(reducer.reduce, arrays, out=out)
    assert type(error) is DeviceUnavailableError
    assert "no compiler" in str(error)
    assert rank == size - 1 or f"rank {size - 1}" in str(error)
    assert all((array.get() == -7).all() for array in mine.values())
    works(reducer, size)
    reducer.reduce(mine, out=mine)


@EACH
@pytest.mark.ranks(min=2)
def test_a_disagreement_leaves_the_results_alone(cp, maker, rank, size):
    reducer = maker({"x": (900,), "y": (300,)})
    mine = empty_like(cp, {"x": (900,), "y": (300,)}, np.float32)
    out = empty_like(cp, {"x": (900,), "y": (300,)}, np.float32)
    with pytest.raises(DisagreementError):
        reducer.reduce(mine, out=out, step=int(rank == 0))

    assert all((array.get() == -7).all() for array in out.values())
    works(reducer, size)


@ALL
@pytest.mark.parametrize("bound", [200, 1 << 20])
def test_memory_is_pinned_where_it_pays(
    cp, pinned, maker, rank, size, monkeypatch, bound
):
    monkeypatch.setattr(device_exchange, "_PIN", bound)
    reducer = maker({"x": (5000,)})
    mine = {"x": cp.full((5000,), float(rank), np.float32)}
    for step in range(2):
        reducer.reduce(mine, out=mine, step=step, reduction_type="SUM")
        assert len(pinned) == (0 if bound > 20_000 else 2)
    reducer.free()

    assert not pinned
