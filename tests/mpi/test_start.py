"""The start of training: equal values on all ranks, dtypes that can be exchanged."""

import logging

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError
from hpcaccum.optimizers import start

from .test_cross_shard import shards
from .training import ONE_SIDED, WRAPPERS, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size


def cross_shard(comm, **options):
    return hpc.CrossShardOptimizer(hpc.SGD(1), comm=comm, **options)


def odd_ones(rank):
    """Return variables of all dtypes, shapes and memory orders."""
    kinds = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
    arrays = [np.full((2, 3), rank + i, kind) for i, kind in enumerate(kinds)]
    arrays += [
        np.array(rank, np.float64),
        np.zeros((0, 2)),
        np.full((4, 6), rank, "f4"),
    ]
    arrays[2] = np.asfortranarray(arrays[2])
    arrays[-1] = arrays[-1][::-2, 1::2]
    return [hpc.Variable(array, f"v{i}") for i, array in enumerate(arrays)]


def test_a_group_begins_with_the_variables_of_its_first_rank(
    comm, rank, size, monkeypatch
):
    # Chunks are smaller than a variable.
    monkeypatch.setattr(start, "_CHUNK_BYTES", 20)
    for groups in [None, *shards(size)]:
        first = next(ranks for ranks in groups if rank in ranks)[0] if groups else 0
        mine = odd_ones(rank)
        arrays = [var.value for var in mine]
        with cross_shard(comm, group_assignment=groups) as opt:
            opt.initialize(mine)
        for var, array, expected in zip(mine, arrays, odd_ones(first), strict=True):
            assert var.value is array
            assert array.tobytes() == expected.value.tobytes()


@pytest.mark.parametrize("start_by", ["compute", "apply", "minimize"])
def test_ranks_that_begin_unlike_end_alike(comm, rank, size, start_by):
    w = variable(np.full(3, float(rank)))
    with cross_shard(comm) as opt:
        for _ in range(3):
            grads = gives(np.full(3, float(rank)))
            if start_by == "minimize":
                opt.minimize(grads, var_list=[w])
            elif start_by == "compute":
                opt.apply_gradients(opt.compute_gradients(grads, [w]))
            else:
                opt.apply_gradients([(np.full(3, rank / size), w)])

    np.testing.assert_allclose(w.value, -3 * (size - 1) / 2)
    assert len({value.tobytes() for value in meet(w.value)}) == 1


def test_the_same_bytes_are_accepted_without_a_broadcast(comm, rank):
    w, v = variable([np.nan, -0.0, 3.0]), variable(np.arange(6.0)[::2], name="v")
    with started(cross_shard(comm, sync=False), [w, v]) as opt:
        opt.apply_gradients([(np.zeros(3), w), (np.ones(3), v)])


@pytest.mark.ranks(min=2)
def test_other_bytes_are_refused_by_all_of_a_group(comm, rank, size):
    for groups in [None, *shards(size)]:
        mine = (
            next(ranks for ranks in groups if rank in ranks)
            if groups
            else [*range(size)]
        )
        last = max(mine)
        v, w = variable(1.0, name="v"), variable([0.0, -0.0 if rank == last else 0.0])
        with cross_shard(comm, group_assignment=groups, sync=False) as opt:
            error = raised(opt.initialize, [v, w])
            before = w.value.tobytes()
            w.value[...] = 0
            opt.initialize([v, w])
        if len(mine) == 1:
            assert error is None
            continue
        assert type(error) is DisagreementError
        first = mine[0]
        others = [last] if first != last else sorted(set(mine) - {last})
        assert "variable 'w' must start with the same values" in str(error)
        assert f"{start.format_ranks(others)} unlike rank {first};" in str(error)
        assert before == np.array([0.0, -0.0 if rank == last else 0.0]).tobytes()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_integers_are_refused_by_name_on_all_ranks(comm, rank, size, wrapper):
    w, count = variable(), variable(0, np.int64, "count")
    step = hpc.Variable(0, "step", trainable=False)
    opt = WRAPPERS[wrapper](hpc.SGD(1), [w, count], comm)
    errors = [
        raised(opt.initialize, [w, count] if rank in those else [w])
        for those in (range(size), [size - 1])
    ]
    opt.initialize([w])
    for _ in range(2):
        opt.minimize(gives(1.0), step)
    opt.free()

    for error in errors:
        assert type(error) is InvalidArgumentError
        text = "variable 'count' is of int64 and cannot be trained; use a float"
        assert text in str(error)
    assert w.value < 0 < step.value


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_one_warning_names_what_is_wider_than_the_rest(comm, rank, wrapper, caplog):
    kinds = ["f2", "f4", "f8", "f8"]
    mixed = [variable(0.0, kind, f"v{i}") for i, kind in enumerate(kinds)]
    with (
        caplog.at_level(logging.WARNING, "hpcaccum"),
        WRAPPERS[wrapper](hpc.SGD(1), mixed, comm) as opt,
    ):
        opt.initialize(mixed)
        for _ in range(2):
            opt.minimize(gives(*(np.ones((), kind) for kind in kinds)))
    messages = [record.getMessage() for record in caplog.records]

    assert len(messages) == (rank == 0)
    if rank == 0:
        assert "exchanged as float64, the dtype of 'v2', 'v3' (2 of 4" in messages[0]
    assert [str(var.dtype) for var in mixed] == [
        "float16",
        "float32",
        "float64",
        "float64",
    ]


@pytest.mark.parametrize("wrapper", ONE_SIDED)
def test_what_travels_in_its_own_dtype_needs_no_warning(comm, wrapper, caplog):
    halves = [variable(0.0, kind, f"v{i}") for i, kind in enumerate(["f2", "f4"])]
    with WRAPPERS[wrapper](hpc.SGD(1), halves, comm) as opt:
        opt.initialize(halves)

    assert caplog.records == []
