"""Reducer with device arrays: the same results, with all necessary waits."""

import contextlib
import gc
import itertools

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
from hpcaccum.mpi.job import runtime
from hpcaccum.reducer import device as device_exchange

from .. import naive
from .expiring import missed_by
from .on_device import FEW_RANKS, Aware, empty_like, to_device
from .reducing import ALL, EACH, KINDS, OPTIONS, Maker, check, parts_of, works
from .reducing import SHAPES as PAIR
from .training import check_error, raised

pytestmark = [FEW_RANKS, pytest.mark.any_size]

ANY = pytest.mark.parametrize("maker", OPTIONS, indirect=True)
SHAPES = {"scalar": (), "empty": (0,), "vector": (2330,), "matrix": (15, 117)}
DTYPES = ["float32", "float16", ml_dtypes.bfloat16, "float64"]


@pytest.fixture(autouse=True)
def all_pinned(monkeypatch):
    # Copies to memory that is not pinned always wait.
    monkeypatch.setattr(device_exchange, "_PIN", 0)


@pytest.fixture
def waits(cp, monkeypatch):
    """Waits for the simulated device, which runs nothing early.

    On a real device they cannot be observed.
    """
    found = []
    if not cp.__version__.endswith("simulated"):
        return found
    monkeypatch.setattr(cp._queues, "progress", 0.0)
    queues = cp._queues
    for where, name in (queues.Queue, "synchronize"), (queues, "synchronize_device"):
        monkeypatch.setattr(where, name, counted(getattr(where, name), found))
    return found


def counted(function, calls):
    def wait(*args, **options):
        calls.append(function)
        return function(*args, **options)

    return wait


# Where the arrays of a rank are, how many of them it starts, and where it wants the
# results.
WAYS = [
    *itertools.product(["device", "host"], [0, 1, 4], ["device", "host", "results"]),
    ("device", 0, "inputs"),
]


def reduced(cp, reducer, arrays, way):
    place, started, wanted = way
    mine = to_device(cp, arrays) if place == "device" else arrays
    wide = next(iter(reducer.results().values())).dtype
    out = mine if wanted == "inputs" else None
    if wanted in ("device", "host"):
        out = empty_like(cp if wanted == "device" else np, SHAPES, wide)
    names = [*mine]
    for name in names[:started]:
        reducer.start(name, mine[name])
    rest = {name: mine[name] for name in names[started:]}
    return reducer.reduce(rest, out=out) if rest else reducer.wait(out=out)


def check_ways(cp, maker, reducer, dtype, **options):
    """Reduce in all ways: all ranks alike, or each on its own stream in another way."""
    rank, size = maker.group.rank, maker.group.size
    ways = WAYS if dtype == "float32" else WAYS[:-1]
    if maker.kind == "nccl":
        ways = [way for way in ways if way[0] == "device"]
    for call in range(len(ways)):
        parts = parts_of(SHAPES, size, call, dtype=dtype)
        way = ways[(call + 5 * rank * (call % 2)) % len(ways)]
        stream = cp.cuda.Stream(non_blocking=True) if call % 2 else None
        with stream or contextlib.nullcontext():
            found = reduced(cp, reducer, parts[rank], way)
            check(maker, found, parts, dtype, **options)
            # Its memory may become that of the next stream.
            cp.cuda.get_current_stream().synchronize()


@pytest.mark.parametrize(
    ("maker", "dtype"),
    [
        *((kind, "float32") for kind in OPTIONS),
        *zip(KINDS, DTYPES[1:], strict=False),
        *(("nccl", dtype) for dtype in DTYPES[1:]),
    ],
    indirect=["maker"],
    ids=str,
)
def test_results_are_the_same_in_any_way(cp, maker, dtype):
    check_ways(cp, maker, maker(SHAPES, dtype), dtype)


@ANY
def test_inputs_and_results_of_any_float_dtype(cp, maker, size):
    reducer = maker(SHAPES)
    for dtype in ("float16", "float64"):
        ones = {n: np.ones(shape, dtype) for n, shape in SHAPES.items()}
        out = empty_like(cp, SHAPES, dtype)
        reducer.reduce(to_device(cp, ones), out=out, reduction_type="SUM")

        assert all(a.dtype == dtype and (a.get() == size).all() for a in out.values())


@ANY
def test_streams_may_change_from_call_to_call(cp, maker, rank, size):
    reducer, outs, streams = maker(SHAPES), [], []
    for call in range(4):
        streams.append(cp.cuda.Stream(non_blocking=True))
        with streams[-1]:
            mine = to_device(cp, parts_of(SHAPES, size, call, dtype=np.float32)[rank])
            for array in mine.values():
                array *= 2
            outs.append(reducer.reduce(mine, out=empty_like(cp, SHAPES, np.float32)))
            for array in (*mine.values(), *outs[-1].values()):
                array /= 2
    cp.cuda.Device().synchronize()
    for call, out in enumerate(outs):
        check(maker, out, parts_of(SHAPES, size, call, dtype=np.float32), np.float32)


# Arrays that are started


@pytest.mark.parametrize(
    ("maker", "pinned_from"),
    [*zip(KINDS, [0, 1 << 20, 0, 0, 0, 1 << 20], strict=True)],
    indirect=["maker"],
)
def test_start_does_not_wait_for_the_device(
    cp, waits, maker, rank, size, monkeypatch, pinned_from
):
    monkeypatch.setattr(device_exchange, "_PIN", pinned_from)
    reducer, outs = maker(SHAPES), []
    for call in range(6):
        mine = parts_of(SHAPES, size, call, dtype=np.float32)[rank]
        outs.append(empty_like(cp, SHAPES, np.float32))
        with cp.cuda.Stream(non_blocking=True):
            # Results of the call before may still be on their way to the device.
            mine = mine if call % 3 == 1 else to_device(cp, mine)
            for name in sorted(mine, reverse=call % 2):
                so_far = len(waits)
                reducer.start(name, mine[name])
                assert len(waits) == so_far
        reducer.wait(out=outs[-1])
    for call, out in enumerate(outs):
        check(maker, out, parts_of(SHAPES, size, call, dtype=np.float32), np.float32)


@ALL
def test_arrays_of_host_and_device_have_one_weight(cp, maker, rank, size):
    reducer, weights = maker(SHAPES), [2.0 + each for each in range(size)]
    for call in range(6):
        parts = [
            {name: array.round() for name, array in part.items()}
            for part in parts_of(SHAPES, size, call, dtype=np.float32)
        ]
        for number, (name, array) in enumerate(parts[rank].items()):
            given = cp.asarray(array) if (number + call + rank) % 3 == 0 else array
            reducer.start(name, given, weight=weights[rank])
        for name, array in reducer.wait(weight=weights[rank]).items():
            every = [part[name] for part in parts]
            maker.check(array, np.asarray(naive.allreduce(every, weights=weights)))


@ANY
@pytest.mark.parametrize("what", ["deleted", "written"])
def test_what_was_started_may_be_deleted_or_written(cp, waits, maker, rank, size, what):
    reducer = maker(SHAPES)
    for call in range(2):
        parts = parts_of(SHAPES, size, call, dtype=np.float32)
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        cp.cuda.Device().synchronize()
        others, computing = [], cp.cuda.get_current_stream()
        for name in SHAPES:
            if what == "deleted":
                with cp.cuda.Stream(non_blocking=True):
                    reducer.start(name, mine.pop(name))
                others.append(cp.full(SHAPES[name], 99, np.float32))
            else:
                reducer.start(name, mine[name])
                mine[name].fill(99)
        computing.synchronize()
        reducer.wait(out=out)
        check(maker, out, parts, np.float32)


@ALL
def test_what_was_started_does_not_outlive_a_failure(cp, waits, maker, rank, size):
    reducer = maker(PAIR)
    bad = {name: cp.full((n,), np.nan, np.float32) for name, n in [("x", 900)]}
    reducer.start("x", bad["x"])
    error = raised(reducer.fail, ValueError("rank says no"))

    assert "rank says no" in str(error)
    works(reducer, size)


def fails(name):
    raise DeviceUnavailableError("no compiler")


@ALL
def test_a_device_that_fails_in_start_is_an_error_on_this_rank(
    cp, maker, size, monkeypatch
):
    reducer = maker(PAIR)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "kernel", fails)
        error = raised(reducer.start, "x", cp.ones((900,), np.float32))

    assert type(error) is DeviceUnavailableError
    works(reducer, size)


# Memory


@ALL
@pytest.mark.parametrize("bound", [200, 1 << 20])
def test_memory_is_pinned_where_it_pays(cp, pinned, maker, rank, monkeypatch, bound):
    monkeypatch.setattr(device_exchange, "_PIN", bound)
    reducer = maker({"x": (5000,)})
    mine = {"x": cp.full((5000,), float(rank), np.float32)}
    for step in range(2):
        reducer.reduce(mine, out=mine, step=step, reduction_type="SUM")
        assert len(pinned) == (0 if bound > 20_000 else 2)
    reducer.free()

    assert not pinned


@ALL
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_free_releases_the_memory_of_the_device(cp, pinned, maker, dtype):
    mine, pool = empty_like(cp, SHAPES, dtype), cp.get_default_memory_pool()
    gc.collect()
    before = pool.used_bytes()
    reducer = maker(SHAPES, dtype)
    for step in range(2):
        with cp.cuda.Stream(non_blocking=True):
            reducer.reduce(mine, out=mine, step=step)
            reducer.start("vector", mine["vector"])
            reducer.wait(out={"vector": mine["vector"]}, step=step)
    reducer.start("vector", mine["vector"])
    reducer.free()

    assert pool.used_bytes() == before
    assert not pinned


@ANY
def test_free_waits_for_results(cp, waits, maker, rank, size):
    reducer, parts = maker(SHAPES), parts_of(SHAPES, size, 1, dtype=np.float32)
    first = empty_like(cp, SHAPES, np.float32)
    # Memory of the device is allocated on the first call's stream.
    reducer.reduce(first, out=first)
    with cp.cuda.Stream(non_blocking=True):
        mine, out = to_device(cp, parts[rank]), empty_like(cp, SHAPES, np.float32)
        reducer.reduce(mine, out=out, step=1)
    reducer.free()
    others = [cp.full(9000, 99, np.float32) for _ in range(3)]
    cp.cuda.get_current_stream().synchronize()

    check(maker, out, parts, np.float32)
    del others


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
    for call in range(3):
        parts = parts_of(SHAPES, size, call, dtype=dtype)
        found = reduced(cp, reducer, parts[rank], ("device", 0, "device"))
        check(maker, found, parts, dtype, mean=kind == "MEAN")
        assert comm.given == (call + 1) * buckets
    assert not any(array.any() for array in reducer.arrays().values())
    check_ways(cp, maker, reducer, dtype, mean=kind == "MEAN")


@FLAT
def test_an_mpi_that_takes_device_memory_is_not_given_it_unasked(
    cp, aware, maker, rank, size
):
    reducer, parts = maker(SHAPES), parts_of(SHAPES, size, 0, dtype=np.float32)
    comm, out = Aware.of(reducer), empty_like(cp, SHAPES, np.float32)
    reducer.reduce(to_device(cp, parts[rank]), out=out)

    check(maker, out, parts, np.float32)
    assert not comm.given


@FLAT
@pytest.mark.ranks(min=2)
def test_no_rank_enters_a_blocking_call_before_all_have_arrived(
    cp, comm, aware, maker, rank, size
):
    reducer = maker({"x": (900,)}, cuda_aware=True)
    given, mine = Aware.of(reducer), {"x": cp.ones(900, np.float32)}
    reducer.reduce(mine, out=mine)
    before = given.given
    error = missed_by(size - 1, comm, reducer.reduce, mine, out=mine)

    assert given.given == before
    if rank != size - 1:
        assert type(error) is WaitTimeoutError
        assert f"for rank {size - 1} of {size} to make the same call" in str(error)


@FLAT
@pytest.mark.ranks(min=2)
def test_no_rank_enters_a_blocking_call_with_another_step(cp, aware, maker, rank, size):
    reducer = maker(PAIR, cuda_aware=True)
    comm = Aware.of(reducer)
    mine = empty_like(cp, PAIR, np.float32)
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
    shapes, before = PAIR, cp.cuda.Device().id
    reducer = maker(shapes)
    reducer.reduce(empty_like(cp, shapes, np.float32))
    with cp.cuda.Device(before if rank else 1 - before):
        mine = empty_like(cp, shapes, np.float32)
        error = raised(reducer.reduce, mine)
    check_error(error, f"is on device {before}, the current one is {1 - before}")
    works(reducer, size)


@EACH
@pytest.mark.parametrize("where", ["inputs", "out"])
def test_a_device_that_fails_on_one_rank_is_an_error_on_all(
    cp, maker, rank, size, where, monkeypatch
):
    reducer = maker(PAIR)
    mine = empty_like(cp, PAIR, np.float32)
    with monkeypatch.context() as patch:
        if rank == size - 1:
            patch.setattr(kernels, "kernel", fails)
        arrays, out = (mine, None) if where == "inputs" else (None, mine)
        error = raised(reducer.reduce, arrays, out=out)
    check_error(error, "no compiler", kind=DeviceUnavailableError)
    assert rank == size - 1 or f"rank {size - 1}" in str(error)
    assert all((array.get() == -7).all() for array in mine.values())
    works(reducer, size)
    reducer.reduce(mine, out=mine)


def bad_arrays(cp):
    good = {"x": cp.ones((900,), np.float32), "y": cp.ones((300,), np.float32)}
    return [
        ({**good, "y": np.ones(300, np.float32)}, "some on the host"),
        ({**good, "x": cp.ones(1800, np.float32)[::2]}, "contiguous"),
        ({**good, "x": cp.ones(900, np.int32)}, "got int32"),
        ({**good, "x": cp.ones(900, np.complex64)}, "got complex64"),
        ({**good, "x": cp.ones(901, np.float32)}, r"\(900,\), got \(901,\)"),
        ({**good, "z": good["x"]}, "no array is named 'z'"),
    ]


@EACH
@pytest.mark.parametrize("where", ["inputs", "out"])
def test_bad_arrays_are_an_error_everywhere(cp, maker, rank, size, where):
    reducer = maker(PAIR)
    good, bad_ones = empty_like(cp, PAIR, np.float32), bad_arrays(cp)
    if where == "out":
        bad_ones.append(({**good, "y": good["x"][:300]}, "share memory"))
    for bad, message in bad_ones:
        mine, out = (bad, good) if where == "inputs" else (good, bad)
        if rank != size - 1:
            mine, out = good, None
        with pytest.raises(InvalidArgumentError, match=message):
            reducer.reduce(mine, out=out)

        assert all((array.get() == -7).all() for array in good.values())
        works(reducer, size)


@ANY
def test_the_same_array_under_other_names(cp, maker):
    reducer = maker({"x": (900,), "y": (900,)})
    array, out = cp.ones(900, np.float32), cp.zeros(900, np.float32)
    for name in "xyxy":
        for _ in range(2):
            out.fill(0)
            assert list(reducer.reduce({name: array})) == [name]
            reducer.reduce({name: array}, out={name: out})
            assert (out.get() == 1).all()
    with pytest.raises(InvalidArgumentError, match="no array is named 'z'"):
        reducer.reduce({"z": array})
    with pytest.raises(InvalidArgumentError, match="'y': it is not an array of this"):
        reducer.reduce({"x": array}, out={"y": out})
