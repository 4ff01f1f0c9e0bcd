"""Whatever hpcaccum asks of a device is something that the true CuPy does.

No kernel runs, so no number is compared: calls, dtypes, streams, events, pinned memory,
compilation; and no warning, as all are errors.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import re

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.bench.device import DEVICE_BENCHMARKS, timed
from hpcaccum.device import arrays as device
from hpcaccum.device import card, kernels
from hpcaccum.mpi.job import runtime
from hpcaccum.optimizers.finite import to_drop

DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64"]
ALL = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = {"x": (300, 7), "y": (), "none": (0,)}
NOTHING = contextlib.nullcontext()
PINNED = 4  # registered memory, by the number of its kind in driver.c


@pytest.fixture(autouse=True)
def nothing_left(cp, driver, monkeypatch):
    """All memory of the device is given back, and no host memory is pinned."""
    monkeypatch.setenv("HPCACCUM_TIMEOUT", "30")
    gc.collect()
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    yield
    gc.collect()
    assert pool.used_bytes() == before
    assert not driver.null_driver_used(PINNED)


def arrays(cp, dtype, shapes=SHAPES):
    return {name: cp.zeros(shape, dtype) for name, shape in shapes.items()}


def test_versions(cp):
    assert int(cp.__version__.split(".")[0]) >= device._OLDEST
    print(cp.__version__)


@pytest.mark.parametrize("file", kernels.files())
def test_kernels_are_compiled(cp, file):
    kernels._module(file, 0).compile()


ARCHITECTURES = ["80", "100"]
# The most with which 4 blocks of 256 threads are at work at once.
MOST_REGISTERS = 64


@pytest.fixture
def compiled(cp, monkeypatch, tmp_path):
    """Compile a file as CuPy does on a device of an architecture; return the log."""
    from cupy._core import core
    from cupy.cuda import compiler

    # For what is compiled already there would be no log.
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))

    def run(file, architecture):
        flags = f"-arch=sm_{architecture}", "cubin"
        ask = "_get_arch_for_options_for_nvrtc"
        monkeypatch.setattr(compiler, ask, lambda arch=None: flags)
        log, options = io.StringIO(), ("--std=c++17", "--ptxas-options=-v")
        source = kernels.source(file)
        core.compile_with_cache(source, options, architecture, log_stream=log)
        return log.getvalue()

    return run


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("file", kernels.files())
def test_kernels_have_no_flaw_on_devices_of_others(compiled, file, architecture):
    log = compiled(file, architecture)

    # The front end's, the assembler's; a kernel's name may have the word in it.
    assert not re.search(r"\bwarning\b", log, re.IGNORECASE), log
    entries = re.findall(r"Compiling entry function '(\w+)' for 'sm_\w+'", log)
    assert {*entries} == {name for name, of in kernels.FILES.items() if of == file}
    used = re.findall(r"Used (\d+) registers", log)
    stacks = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log
    )
    assert len(used) >= len(entries) <= len(stacks)
    assert max(map(int, used)) <= MOST_REGISTERS, log
    assert {*itertools.chain(*stacks)} == {"0"}, log


def test_an_architecture_that_nvrtc_does_not_know_is_named(compiled):
    with pytest.raises(Exception, match="arch") as caught:
        compiled("accumulate.cu", "30")

    error = str(caught.value)
    [cause] = [text for seen, text in kernels._CAUSES if re.search(seen, error)]
    assert cause.startswith("the installed NVRTC does not support this device")


def test_what_a_device_is_asked(cp):
    assert device.use_device(3) == 0
    assert re.search(r"Null device, \d+ GiB, CUDA 13.0, CuPy", device.device_name())


@ALL
def test_copies(cp, dtype):
    for layout in np.ones((4, 6)), np.ones((4, 12))[:, ::2]:
        here, there = layout.astype(dtype), cp.zeros((4, 6), dtype)
        other = cp.zeros((4, 6), "float32")
        device.copyto(there, here)
        device.copyto(here, there)
        device.copyto(other, there)
        device.copyto(there, np.float64(layout).astype("float32"))
        device.copyto(layout, other)
        assert device.to_host(there).dtype == dtype
    device.check_array("x", there, [np.dtype(dtype)])
    assert device.library(there) is cp
    device.release({"x": there})


@ALL
def test_memory_and_streams_of_another_library(cp, dtype):
    own = cp.zeros((4, 6), dtype)
    # The adapter of PyTorch passes bfloat16 as integers.
    bits = own.view("int16") if dtype is ml_dtypes.bfloat16 else own
    array = device.shared_array(bits).view(dtype)
    del bits
    assert array.data.ptr == own.data.ptr
    assert array.dtype == dtype
    assert device.is_device(array)
    device.check_array("x", array, [np.dtype(dtype)])

    for stream in cp.cuda.Stream.null, cp.cuda.Stream(non_blocking=True):
        with device.on_stream(stream.ptr):
            assert cp.cuda.get_current_stream().ptr == stream.ptr
            device.copyto(array, own)
            cp.cuda.get_current_stream().record().synchronize()
    assert cp.cuda.get_current_stream().ptr == 0


def test_host_memory_is_pinned(cp, driver):
    memory = device.Pinned(np.zeros(1 << 16))
    assert driver.null_driver_used(PINNED) == 1
    memory.free()


@ALL
@pytest.mark.parametrize("named", [True, False])
def test_accumulator(cp, driver, dtype, named):
    shape = SHAPES if named else SHAPES["x"]
    for norm in None, 1.0:
        with hpc.DeviceAccumulator(dtype, shape, clip_norm=norm) as acc:
            grad = arrays(cp, dtype) if named else cp.zeros(shape, dtype)
            for out in None, grad:
                with cp.cuda.Stream(non_blocking=True):
                    receipt = acc.apply_grad(grad, 1, scale=0.5)
                    assert receipt.lag == receipt.global_step - 1
                found = acc.take_grad(1, timeout=0, out=out)
            del found, out
            launches = driver.null_driver_launches(None)
            acc.set_global_step(7)
            assert not acc.apply_grad(grad, 6)
            assert acc.num_accumulated() == acc.statistics().num_accumulated == 0
            assert "step 7, 0 accumulated" in repr(acc)
            assert driver.null_driver_launches(None) == launches
    if named and np.dtype(dtype) == np.float32:
        assert driver.null_driver_launches(b"multi_accumulate_f32") >= 2
        assert driver.null_driver_launches(b"mean_clip_f32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows(cp, dtype):
    with hpc.DeviceRowAccumulator(dtype, (50, 3)) as acc:
        rows = cp.asarray(np.array([1, 1, 4]))
        receipt = acc.apply_grad(rows, cp.zeros((3, 3), dtype))
        assert receipt.accepted
        assert len(acc.take_grad(1, timeout=0)) == 2


RULES = {
    "SGD": lambda: hpc.SGD(0.1),
    "Momentum": lambda: hpc.Momentum(0.1, 0.9),
    "Nesterov": lambda: hpc.Momentum(0.1, 0.9, use_nesterov=True),
    "Adagrad": lambda: hpc.Adagrad(0.1),
    "Adam": lambda: hpc.Adam(0.01, weight_decay=0.1),
}


@ALL
@pytest.mark.parametrize("rule", RULES)
def test_updates(cp, dtype, rule):
    one, other = (hpc.Variable(cp.zeros(100, dtype), name) for name in "ab")
    opt = RULES[rule]()
    for _ in range(2):
        opt.apply_gradients([(other.value, one), (one.value, other)])
    assert all(cp.cuda.Device() == v.value.device for v in opt.variables()[:1])
    assert str(one.dtype) in repr(one)


@ALL
def test_one_launch_updates_all_variables(cp, driver, dtype):
    makers = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    variables = [hpc.Variable(cp.zeros(n, dtype), f"w{n}") for n in range(40)]
    opt = hpc.Momentum(0.1, 0.9)
    opt.initialize(variables)
    suffix = kernels.SUFFIXES[np.dtype(dtype)]

    def launches():
        return driver.null_driver_launches(f"momentum_{suffix}".encode())

    before = launches()
    for step in range(3):
        grads = [cp.zeros(n, makers[n % 4]) if n != step else None for n in range(40)]
        with cp.cuda.Stream(non_blocking=True):
            opt.apply_gradients(zip(grads, variables, strict=True))
        del grads
    assert launches() == before + 3
    opt._kept_state(None).release()


def test_one_launch_checks_all_gradients(cp, driver):
    given = [
        (f"w{n}", cp.zeros((n, 3), dtype)[::step], np.dtype(np.float32))
        for n, (dtype, step) in enumerate(itertools.product(DTYPES, (1, 1, 2)))
    ]
    before = driver.null_driver_launches(b"largest_f64")
    assert not to_drop("it", given, "raise")
    assert driver.null_driver_launches(b"largest_f64") == before + 1


KINDS = {
    "eager": {"schedule": "shared"},
    "shared": {"schedule": "shared", "bucket_bytes": 1024},
    "flat": {"schedule": "flat", "bucket_bytes": 1024},
    "cuda_aware": {"schedule": "flat", "bucket_bytes": 1024, "cuda_aware": True},
}


@pytest.fixture
def aware(monkeypatch):
    """Memory of this device is the host's: every MPI takes it."""
    monkeypatch.setenv(runtime.VARIABLE, "1")
    runtime.cuda_awareness.cache_clear()
    yield
    runtime.cuda_awareness.cache_clear()


@ALL
@pytest.mark.parametrize("kind", KINDS)
def test_reducer(cp, aware, dtype, kind):
    layout = hpc.Layout(SHAPES | {"large": (1 << 16,)}, dtype)
    mine = arrays(cp, dtype, layout.shapes)
    with hpc.Reducer(layout, **KINDS[kind]) as reducer:
        for _ in range(2):
            with cp.cuda.Stream(non_blocking=True):
                reducer.reduce(mine, out=mine)
            reducer.reduce(mine)
            for name in mine:
                reducer.start(name, mine[name])
            reducer.wait(out=mine)
            reducer.reduce({"x": mine["x"]}, reduction_type="SUM")


def test_nccl_fails_without_a_card(cp, driver):
    # With the library, it is asked to connect; without it, CuPy finds none.
    expected = r"CuPy finds no NCCL: pip|NCCL cannot connect: NCCL_ERROR"
    with pytest.raises(RuntimeError, match=expected):
        hpc.Reducer(hpc.Layout(SHAPES, "float32"), schedule="nccl")
    assert re.fullmatch("[0-9A-Fa-f]{4}:.*", card())


def losses(cp, var):
    return lambda: (0.0, {var.name: cp.zeros(var.shape, var.dtype)})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by_mpi", [True, False])
def test_cross_shard(cp, aware, dtype, by_mpi):
    w = hpc.Variable(cp.zeros(300, dtype), "w")
    with hpc.CrossShardOptimizer(hpc.SGD(0.1), cuda_aware=by_mpi) as opt:
        opt.initialize([w])
        opt.gradient_arrays()["w"].fill(0)
        for _ in range(2):
            opt.minimize(losses(cp, w))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["sync-replicas", "drop-stale", "agn"])
def test_one_sided(cp, dtype, kind):
    getter = hpc.AGNCustomGetter()
    w = hpc.get_variable("w", cp.zeros(300, dtype), custom_getter=getter)
    sgd = hpc.SGD(0.1)
    made = {
        "sync-replicas": lambda: hpc.SyncReplicasOptimizer(sgd, 1),
        "drop-stale": lambda: hpc.DropStaleGradientOptimizer(sgd, staleness=1),
        "agn": lambda: hpc.AGNOptimizer(sgd, 1, getter, communication_period=2),
    }
    with made[kind]() as opt:
        opt.initialize([w])
        for _ in range(4):
            opt.minimize(losses(cp, w))
        assert opt.center(w).shape == (300,)
    getter.variables.clear()


@ALL
@pytest.mark.parametrize("rows", [[1, 4], [4, 1], [4, 4]])
def test_sparse_conditional_accumulator(cp, dtype, rows):
    with hpc.SparseConditionalAccumulator(dtype, (50, 3), capacity=9) as acc:
        for _ in range(2):
            assert acc.apply_grad(rows, cp.zeros((2, 3), dtype))
        indices = cp.asarray(np.array(rows))
        # They are int64: others are converted by a kernel, and this driver runs none.
        assert acc.apply_grad(indices, cp.zeros((2, 3), dtype))
        indices, values, _ = acc.take_grad(3, timeout=10, on_device=True)
        assert values.dtype == dtype
        assert indices.dtype == np.int64


def test_conditional_accumulator(cp):
    with hpc.ConditionalAccumulator("float32", shape=(300,)) as acc:
        assert acc.apply_grad(cp.zeros(300, np.float32))
        acc.take_grad(1, timeout=10, out=cp.zeros(300, np.float32))


class Zeros:
    """Random numbers, of a kind: CuPy takes its own from another library."""

    def standard_normal(self, count, dtype):
        return device.cupy().zeros(count, dtype)

    def integers(self, low, high, size):
        return device.cupy().zeros(size, np.int64)


@pytest.mark.parametrize("name", DEVICE_BENCHMARKS)
def test_benchmarks(cp, name, monkeypatch):
    monkeypatch.setattr(cp.random, "default_rng", lambda seed: Zeros())
    case = DEVICE_BENCHMARKS[name](hpc.group_of(), 65536)
    case.forget()
    for kind in case.kinds:
        # A dot product of CuPy's.
        with contextlib.suppress(ImportError) if kind.name == "clip CuPy" else NOTHING:
            kind.run(1)
    assert timed(lambda: None)(1)
    if name == "device rows":
        for kind in case.kinds:
            kind.check()
    case.free()
