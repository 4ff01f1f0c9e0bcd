"""Faults planted in the kernels: found by the tests or by the race check."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import traceback
from functools import partial

import cupy
import pytest

from hpcaccum.device import kernels

from . import (
    test_accumulate,
    test_finish,
    test_multi_tensor,
    test_sparse,
    test_update,
)
from .launching import forget_kernels

accumulate = partial(test_accumulate.test_sum_is_the_numpy_line, "f32", 5003, (0, 0))
accumulate_shifted = partial(accumulate.func, "f32", 1025, (1, 0))
largest = partial(
    test_multi_tensor.test_largest_is_the_largest_absolute_value, "f32", 16, 0
)
largest_of_nan = partial(
    test_multi_tensor.test_nothing_hides_what_is_not_finite, "f32", 1023
)
square_norm = partial(test_finish.test_square_norm_is_that_of_float64, "f32", 5003, 0)
scatter = partial(
    test_sparse.test_rows_are_added_and_counted_where_they_belong, "f32", 33, 3
)
scatter_outside = partial(test_sparse.test_rows_outside_are_refused_and_counted, "f32")
update_by_half = partial(
    test_update.test_only_what_there_is_is_changed, "f32", "f16", "adam", 1025, 0
)
update_with_a_rate_of_its_own = partial(update_by_half.func, "f32", "f32", "sgd", 33, 1)


def scatter_of_groups():
    with test_sparse.groups_of(100):
        scatter()


def update():
    for name in test_update.KERNELS:
        update_by_half.func("f32", "f32", name, 33, 0)


# Each fault: file, correct text, faulty text; the test that finds it, checks to build.
FAULTS = {
    "ticket stays": (
        *("finish.cu", "if (last) *ticket = 0;", ""),
        *(square_norm, ""),
    ),
    "no fence before the ticket": (
        *("finish.cu", "{\n        __threadfence();\n        last =", "{\n last ="),
        *(square_norm, "race"),
    ),
    "ticket without an atomic": (
        "finish.cu",
        "atomicAdd(reinterpret_cast<unsigned long long *>(ticket), 1ull)",
        "(*ticket)++",
        *(square_norm, "race"),
    ),
    "all overwrite the sum": (
        *("accumulate.cu", "if (first)", "if (true)"),
        *(accumulate, ""),
    ),
    "multiplied by the count": (
        *("finish.cu", "return divide(x, divisor);", "return multiply(x, divisor);"),
        *(lambda: test_finish.test_mean_divides_once("f32", 33, 0), ""),
    ),
    "one too many": (
        "common.cuh",
        "steps<1, DEPTH>(full * V + begin, step, n,",
        "steps<1, DEPTH>(full * V + begin, step, n + 1,",
        *(accumulate, ""),
    ),
    "no tail": (
        *("common.cuh", "steps<1, DEPTH>(full * V + begin, step, n, get, put);", ""),
        *(accumulate, ""),
    ),
    "vectors where they do not lie": (
        *("common.cuh", "aligned<V>(sum) && aligned<V>(gradient)", "true"),
        *(accumulate_shifted, "undefined"),
    ),
    "chunk past its array": (
        *("multi_tensor.cu", "min(chunk, row[2] - first)", "chunk"),
        lambda: test_multi_tensor.test_pack_converts_every_array_to_its_place(
            "f32", 16, 0
        ),
        "",
    ),
    "largest without an atomic": (
        "multi_tensor.cu",
        "atomicMax(reinterpret_cast<unsigned long long *>(result) + chunks"
        "[2 * blockIdx.x],\n                  "
        "(unsigned long long)__double_as_longlong(top));",
        "result[chunks[2 * blockIdx.x]] = larger(result[chunks[2 * blockIdx.x]], top);",
        *(largest, "race"),
    ),
    "NaN is no number": (
        *("multi_tensor.cu", "x > top || x != x", "x > top"),
        *(largest_of_nan, ""),
    ),
    "no barrier": (
        *(
            "finish.cu",
            "of_warp[warp] = x;\n    __syncthreads();",
            "of_warp[warp] = x;",
        ),
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
    "rows added without atomics": (
        *("sparse.cu", "atomicAdd(to + j, values.at[j]);", "to[j] += values.at[j];"),
        *(scatter, "race"),
    ),
    "row past the last is added": (
        *("sparse.cu", "part.row < num_rows", "part.row <= num_rows"),
        *(scatter_outside, ""),
    ),
    "all groups of rows are the first": (
        *("sparse.cu", "work(first, min(", "work(0, min("),
        *(scatter_of_groups, ""),
    ),
    "the second slot is the first": (
        *(
            "update.cu",
            "held.slot[s].at[k] = state[s]",
            "held.slot[s].at[k] = state[0]",
        ),
        *(update, ""),
    ),
    "rate of another": (
        *("update.cu", "rates ? rates[row] : rate", "rate"),
        *(update_with_a_rate_of_its_own, ""),
    ),
    "two halves as one float": (
        *("update.cu", "case F16: return", "case 7: return"),
        *(update_by_half, ""),
    ),
    "rounded once instead of twice": (
        "update.cu",
        "minus(x, multiply(g, rate))",
        "multiply_add(-g, rate, x)",
        *(update, ""),
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
