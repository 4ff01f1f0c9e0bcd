"""Each way to find a fault of a kernel, or of its caller, finds one that is planted."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import traceback
from functools import partial

import cupy
import cupyx
import pytest

from hpcaccum.device import kernels

from . import test_accumulate, test_finish, test_multi_tensor
from .launching import forget_kernels

accumulate_shifted = partial(
    test_accumulate.test_sum_is_the_numpy_line, "f32", 1025, (1, 0)
)
square_norm = partial(test_finish.test_square_norm_is_that_of_float64, "f32", 5003, 0)
pack = partial(
    test_multi_tensor.test_pack_converts_every_array_to_its_place, "f32", 16, 0
)


# Each fault: file, correct text, faulty text; the test that finds it, checks to build.
FAULTS = {
    "no fence before the ticket": (
        *("finish.cu", "{\n        __threadfence();\n        last =", "{\n last ="),
        *(square_norm, "race"),
    ),
    "vectors where they do not lie": (
        *("common.cuh", "aligned<V>(sum) && aligned<V>(gradient)", "true"),
        *(accumulate_shifted, "undefined"),
    ),
    "chunk past its array": (
        *("multi_tensor.cu", "min(chunk, row[2] - first)", "chunk"),
        *(pack, ""),
    ),
    "no barrier": (
        "finish.cu",
        "of_warp[warp] = x;\n    __syncthreads();",
        "of_warp[warp] = x;",
        *(square_norm, ""),
    ),
    "a barrier for some": (
        "finish.cu",
        "if (lane == 0) of_warp[warp] = x;\n    __syncthreads();",
        "if (lane == 0) {\n of_warp[warp] = x;\n __syncthreads();\n }",
        *(square_norm, ""),
    ),
    "a mask without its own lanes": (
        *("finish.cu", "__shfl_down_sync(0xffffffffu", "__shfl_down_sync(0x0000ffffu"),
        *(square_norm, ""),
    ),
}


def plant(fault, folder):
    """Copy the kernels to a folder, one of them with its fault."""
    file, right, wrong = FAULTS[fault][:3]
    shutil.copytree(kernels.shipped("kernels"), folder)
    text = (folder / file).read_text()
    assert right in text, "the kernel has changed: plant the fault anew"
    (folder / file).write_text(text.replace(right, wrong, 1))


def take_kernels_from(folder):
    """Make this process, a child of the test's, use other kernels."""
    forget_kernels()
    kernels.shipped = lambda _: folder


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault, tmp_path):
    plant(fault, tmp_path / "kernels")
    find, checks = FAULTS[fault][3:]
    child = os.fork()
    if child == 0:
        # A fault may end the process; where is not of interest.
        faulthandler.disable()
        os.environ["CPU_CUDA_CHECKS"] = checks
        os._exit(_outcome(tmp_path / "kernels", find))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert status != 0, "not found"
    assert status != 2, "the test itself failed"


def _outcome(folder, find):
    try:
        take_kernels_from(folder)
        find()
    except (AssertionError, cupy.cuda.runtime.CUDARuntimeError):
        traceback.print_exc(limit=1, file=sys.stdout)
        return 1
    except BaseException:
        traceback.print_exc()
        return 2
    return 0


def on(stream, act):
    with stream:
        return act()


def read_at_once(x, event, other):
    return x._host.copy()


def read_by_another_stream(x, event, other):
    y = on(other, lambda: x * 2)
    other.synchronize()
    return y.get() / 2


def read_in_order(x, event, other):
    other.wait_event(event)
    return read_by_another_stream(x, event, other)


def read_when_freed(x, event, other):
    other.wait_event(event)
    found = cupyx.empty_pinned(x.shape, x.dtype)
    x.get(stream=other, out=found, blocking=False)
    del x
    cupy.cuda.Stream.null.synchronize()
    other.synchronize()
    return found


@pytest.mark.parametrize(
    ("read", "right"),
    [
        (read_at_once, False),
        (read_by_another_stream, False),
        (read_in_order, True),
        (read_when_freed, False),
    ],
)
def test_a_missing_wait_is_seen(monkeypatch, read, right):
    """The simulated device is as late as a device may be."""
    monkeypatch.setattr(cupy._queues, "progress", 0.0)
    other = cupy.cuda.Stream(non_blocking=True)
    sums = [cupy.ones(2, "float32") + 1]
    found = read(sums.pop(), cupy.cuda.get_current_stream().record(), other)
    cupy.cuda.Device().synchronize()

    assert (found == 2).all() == right
