"""Faults planted in the kernels: found by the tests or by the race check."""

from __future__ import annotations

import os
import shutil
import sys
import traceback

import cupy
import pytest

from hpcaccum.device import kernels

from . import (
    test_accumulate,
    test_compress,
    test_finish,
    test_multi_tensor,
    test_sparse,
    test_update,
)


def accumulate():
    test_accumulate.test_sum_is_the_numpy_line("f32", 5003, (0, 0))


def accumulate_shifted():
    test_accumulate.test_sum_is_the_numpy_line("f32", 1025, (1, 0))


def stale():
    test_accumulate.test_stale_changes_nothing_but_what_counts_it("f32")


def square_norm():
    test_finish.test_square_norm_is_that_of_float64("f32", 5003, 0)


def scatter():
    test_sparse.test_rows_are_added_and_counted_where_they_belong("f32", 33, 3)


def compress():
    test_compress.test_any_number_of_blocks_compresses_alike(1)


def update():
    for name in test_update.KERNELS:
        test_update.test_only_what_there_is_is_changed("f32", name, 33, 0)


def update_of_chunks():
    test_update.test_only_what_there_is_is_changed("f32", "sgd", 5003, 0)


def update_with_a_rate_of_its_own():
    test_update.test_only_what_there_is_is_changed("f32", "sgd", 33, 1)


def update_of_all():
    test_update.test_a_gradient_may_be_another_variable("sgd")


def update_by_half():
    test_update.test_only_what_there_is_is_changed_by_other_gradients("f16", "adam")


def update_by_shifted_half():
    test_update.test_gradients_of_all_dtypes_are_read_as_they_are("sgd", "f32", "f16")


# What is wrong; in which file, what was right, what is wrong; who finds it, how built.
FAULTS = {
    "ticket stays": (
        *("common.cuh", "if (last) *ticket = 0;", ""),
        *(accumulate, ""),
    ),
    "every block counts": (
        *("common.cuh", "== gridDim.x - 1;", "< gridDim.x;"),
        *(accumulate, ""),
    ),
    "block ends before its threads": (
        *(
            "common.cuh",
            "bool last = false;\n    __syncthreads();",
            "bool last = false;",
        ),
        *(accumulate, "race"),
    ),
    "no fence before the ticket": (
        *("common.cuh", "{\n        __threadfence();\n        last =", "{\n last ="),
        *(square_norm, "race"),
    ),
    "no fence after the ticket": (
        *("common.cuh", "__threadfence();\n        if (last)", "if (last)"),
        *(square_norm, "race"),
    ),
    "ticket without an atomic": (
        "common.cuh",
        "atomicAdd(reinterpret_cast<unsigned long long *>(ticket), 1ull)",
        "(*ticket)++",
        *(accumulate, "race"),
    ),
    "stale is added": (
        *("accumulate.cu", "if (admission.fresh())", "if (true)"),
        *(stale, ""),
    ),
    "stale is counted as accepted": (
        *("common.cuh", "if (fresh()) {", "if (true) {"),
        *(stale, ""),
    ),
    "first is added to what was there": (
        *("common.cuh", "return count == 0;", "return false;"),
        *(accumulate, ""),
    ),
    "count stays": (
        *("common.cuh", "header[COUNT] = 0;", ""),
        lambda: test_finish.test_mean_divides_once_and_begins_the_next_step(
            "f32", 33, 0
        ),
        "",
    ),
    "lag beyond its cells": (
        *("common.cuh", "min((i64)MAX_LAG, step - local_step)", "step - local_step"),
        lambda: test_accumulate.test_lags_are_counted_within_their_bounds(1),
        "",
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
    "steps skipped": (
        *("common.cuh", "i < end; i += step)", "false; i += step)"),
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
    "partial sums left out": (
        *("finish.cu", "i < gridDim.x; i += THREADS)", "i < gridDim.x; i = gridDim.x)"),
        *(test_finish.test_square_norm_of_more_blocks_than_a_block_has_threads, ""),
    ),
    "rows added without atomics": (
        "sparse.cu",
        "atomicAdd(sum + begin + d * LANES, held[d]);",
        "sum[begin + d * LANES] += held[d];",
        *(scatter, "race"),
    ),
    "rows counted without atomics": (
        *("sparse.cu", "atomicAdd(counts + row, 1);", "counts[row] += 1;"),
        *(scatter, "race"),
    ),
    "row past the last": (
        *("sparse.cu", "row < num_rows;", "row <= num_rows;"),
        lambda: test_sparse.test_rows_outside_are_refused_and_counted("f32"),
        "",
    ),
    "warps do not exchange": (
        *("compress.cu", "of_warp[warp ^ 1]", "of_warp[warp]"),
        *(compress, ""),
    ),
    "no barrier between warps": (
        *("compress.cu", "__syncthreads();", ""),
        *(compress, ""),
    ),
    "written while others read": (
        *("compress.cu", "turn = 1 - turn;", ""),
        *(compress, "race"),
    ),
    "slots are not written": (
        *("update.cu", "store<N>(slots[s] + i", "if (s) store<N>(slots[s] + i"),
        *(update, ""),
    ),
    "the second slot is the first": (
        *(
            "update.cu",
            "held.slot[s].at[k] = state[s]",
            "held.slot[s].at[k] = state[0]",
        ),
        *(update, ""),
    ),
    "chunk past its variable": (
        *("update.cu", "min(chunk, variable[3] - first)", "chunk"),
        *(update_of_chunks, ""),
    ),
    "always the first chunk": (
        *("update.cu", "reinterpret_cast<T *>(address) + first", "(T *)address"),
        *(update_of_chunks, ""),
    ),
    "rate of another": (
        *("update.cu", "rates ? rates[row] : rate", "rate"),
        *(update_with_a_rate_of_its_own, ""),
    ),
    "gradient of another": (
        *("update.cu", "gradients + 2 * row", "gradients"),
        *(update_of_all, ""),
    ),
    "two halves as one float": (
        *("update.cu", "case F16: return", "case 7: return"),
        *(update_by_half, ""),
    ),
    "half gradient's chunk at a float's place": (
        *("update.cu", "kind == F32 ? 4 : 2", "4"),
        *(update_by_half, ""),
    ),
    "halves where they do not lie": (
        "update.cu",
        "return gradient.address % (gradient.bytes() * N) == 0;",
        "return true;",
        *(update_by_shifted_half, "undefined"),
    ),
    "rounded once instead of twice": (
        "update.cu",
        "minus(x, multiply(g, rate))",
        "multiply_add(-g, rate, x)",
        *(update, ""),
    ),
}


def plant(fault, folder):
    """Put the kernels into a folder, one of them with its fault."""
    file, right, wrong = FAULTS[fault][:3]
    shutil.copytree(kernels._folder(), folder)
    text = (folder / file).read_text()
    assert right in text, "the kernel has changed: plant the fault anew"
    (folder / file).write_text(text.replace(right, wrong, 1))


def take_kernels_from(folder):
    """Let this process, which is a test's child, use other kernels."""
    for function in ("source", "_file_of", "_kernel", "_module"):
        getattr(kernels, function).cache_clear()
    kernels._folder = lambda: folder


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault, tmp_path):
    plant(fault, tmp_path / "kernels")
    find, checks = FAULTS[fault][3:]
    child = os.fork()
    if child == 0:
        # A fault may end the process.
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
