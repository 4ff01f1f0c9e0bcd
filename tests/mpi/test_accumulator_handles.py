"""Accumulators as objects: names, sharing, communicators, statistics, the end."""

import gc

import numpy as np
import pytest
from mpi4py import MPI

import hpcaccum as hpc

from .acting import WAIT, at, everywhere, meet, same_bits
from .training import check_error, raised

pytestmark = pytest.mark.any_size

INVALID = hpc.InvalidArgumentError


def test_arguments_have_the_order_and_names_of_tensorflow():
    with hpc.ConditionalAccumulator(np.float64, (2,), "shared", "named", "SUM") as acc:
        assert (acc.dtype, acc.name) == (np.float64, "named")
        assert acc.dtype == "float64"
        assert acc.accumulator_ref == "shared:shared"
        everywhere(acc.apply_grad, [1, 2], local_step=0, name="apply")

        assert at(1, acc.num_accumulated, name="count") == MPI.COMM_WORLD.size
        at(1, acc.set_global_step, new_global_step=0, name="set")
        found = at(0, acc.take_grad, num_required=1, name="take", timeout=WAIT)
        same_bits(found, np.array([1.0, 2.0]) * MPI.COMM_WORLD.size)


def test_repr_shows_the_numbers(make):
    acc = make("float32", (2, 3), storage="sum", name="g")
    at(1, acc.set_global_step, 4)
    at(1, acc.apply_grad, np.ones((2, 3)), 4)

    assert repr(acc) == (
        "<ConditionalAccumulator 'g' float32 (2, 3): step 4, 1 accumulated, sum>"
    )


def test_statistics_count_what_became_of_gradients(rank, size):
    with hpc.ConditionalAccumulator("float64", (5,), storage="slots") as acc:
        new = at(1, acc.statistics)
        assert (new.tally.accepted, new.tally.dropped) == ((0,) * size, (0,) * size)
        assert (new.tally.lags, new.storage) == ({}, "slots")
        acc.apply_grad(np.ones(5), 0)
        meet()
        at(0, acc.set_global_step, 50)
        for step in (0, 48, 50, 60):
            acc.apply_grad(np.ones(5), step)
        acc.apply_grad(np.ones(5), 48) if rank == size - 1 else None
        meet()

        found = at(1, acc.statistics)
        assert found.tally.accepted == (3,) * size
        assert found.tally.dropped == (2,) * (size - 1) + (3,)
        # More than 31 steps late counts as 31, early as 0.
        assert found.tally.lags == {0: 3 * size, 2: size + 1, 31: size}
        assert (found.global_step, found.num_accumulated) == (50, 3 * size)
        assert found.left == ()


@pytest.mark.parametrize(("dtype", "itemsize"), [("float16", 4), ("float64", 8)])
def test_memory_is_2_gradients_a_rank_or_2_on_the_host(comm, dtype, itemsize):
    n, host = 1000, comm.size - 1
    gradient = -(-n * itemsize // 64) * 64
    make_one = hpc.ConditionalAccumulator
    with make_one(dtype, (n,), comm=comm, host=host, storage="slots") as acc:
        held = meet(acc.statistics().window_bytes)
        # On each of several nodes, one for what other nodes send.
        nodes = hpc.group_of(comm).nodes
        apart = {ranks[0] for ranks in nodes} if len(nodes) > 1 else set()
        extra = [gradient * (rank in apart) for rank in range(comm.size)]
        assert held == [2 * gradient + more for more in extra]
    with make_one(dtype, (n,), comm=comm, host=host, storage="sum") as acc:
        held = meet(acc.statistics().window_bytes)
        assert held == [0] * host + [2 * gradient]


def test_shared_name_is_one_object(make):
    first = hpc.ConditionalAccumulator("float64", (2,), "the one")
    second = hpc.ConditionalAccumulator("float64", [2], "the one", name="second")
    other = hpc.ConditionalAccumulator("float64", (2,), "the other")

    at(1, first.apply_grad, [1, 2])
    assert (second.num_accumulated(), other.num_accumulated()) == (1, 0)
    assert first.accumulator_ref == second.accumulator_ref != other.accumulator_ref
    assert (first.name, second.name) == ("conditional_accumulator", "second")
    meet()
    first.free()
    with pytest.raises(hpc.FreedError):
        first.num_accumulated()
    same_bits(at(0, second.take_grad, 1, timeout=WAIT), [1.0, 2.0])
    second.free()
    other.free()
    # After the last of them the name is free for something else.
    with hpc.ConditionalAccumulator("float32", (3,), "the one") as third:
        assert third.num_accumulated() == 0
        meet()


def test_shared_name_with_other_arguments_is_an_error_everywhere():
    options = {"dtype": "float64", "shape": (2,), "shared_name": "strict"}
    others = {"dtype": "float32", "shape": 3, "reduction_type": "SUM", "storage": "sum"}
    text = "'strict' already exists with"
    with hpc.ConditionalAccumulator(**options) as acc:
        for field, value in others.items():
            with pytest.raises(INVALID, match=text):
                hpc.ConditionalAccumulator(**{**options, field: value})
            assert everywhere(acc.apply_grad, [1, 2])


def test_shared_names_belong_to_a_communicator(comm):
    with (
        hpc.ConditionalAccumulator("float64", (), "common") as first,
        hpc.ConditionalAccumulator("float64", (), "common", comm=comm) as second,
    ):
        at(1, first.apply_grad, 1)

        assert at(0, second.num_accumulated) == 0


def test_accumulators_of_parts_of_the_ranks(comm, rank, size):
    part = comm.Split(rank % 2, -rank)  # the ranks in reverse order
    with hpc.ConditionalAccumulator(
        "float64", (), comm=part, host=part.size - 1
    ) as acc:
        assert acc.apply_grad(rank)
        part.Barrier()
        assert acc.num_accumulated() == part.size
        part.Barrier()
        if part.rank == 0:
            mean = acc.take_grad(part.size, timeout=WAIT)
            same_bits(mean, np.mean(range(rank % 2, size, 2)))
        assert acc.statistics().tally.dropped == (0,) * part.size
    part.Free()


def test_exception_in_a_with_block_does_not_wait_for_others(rank):
    # Freeing is collective, and other ranks may not call it.
    acc = hpc.ConditionalAccumulator("float64", ())
    if rank == 0:
        with pytest.raises(KeyError), acc:
            raise KeyError
        assert acc.num_accumulated() == 0
    acc.free()


def test_dropped_accumulator_gives_a_warning_and_does_no_harm():
    acc = hpc.ConditionalAccumulator("float64", (), name="lost")
    at(1, acc.apply_grad, 1)
    with pytest.warns(ResourceWarning, match=r"'lost' was dropped without free\(\)"):
        del acc
    gc.collect()

    with hpc.ConditionalAccumulator("float64", ()) as other:
        assert at(0, other.num_accumulated) == 0


@pytest.mark.parametrize("host", [0, -1])
def test_a_snapshot_continues_in_another_accumulator(rank, size, host):
    options = {"dtype": "float64", "shape": (2,), "host": host % size}
    with hpc.ConditionalAccumulator(**options) as acc:
        acc.apply_grad([1, 2], 0)
        meet()
        at(0, acc.set_global_step, 7)
        acc.apply_grad([1, 2], 5) if rank == size - 1 else None
        meet()
        # Any rank may call it.
        before, snapshot = at(0, acc.statistics), acc.snapshot()
        meet()
    with hpc.ConditionalAccumulator(**options) as acc:
        acc.restore(snapshot if rank == options["host"] else None)
        found = acc.statistics()
        assert (found.global_step, found.tally) == (before.global_step, before.tally)
        assert (found.global_step, found.num_accumulated) == (7, 0)
        meet()
        acc.apply_grad([1, 2], 7)
        meet()
        assert acc.statistics().tally.accepted == (2,) * size
        meet()
    assert snapshot["num_accumulated"] == size
    assert snapshot["tally"]["lags"] == [[0, size], [2, 1]]


NO_COUNTS = {"accepted": [], "dropped": [], "nonfinite": [], "lags": []}


@pytest.mark.parametrize(
    ("snapshot", "error", "text"),
    [
        (None, TypeError, "must come from an accumulator, got None"),
        ({"step": 1}, TypeError, "got a dict"),
        ({"global_step": "x"}, INVALID, "global_step must be"),
        ({"global_step": 2**62, "tally": NO_COUNTS}, INVALID, "within +-"),
        ({"global_step": 1}, INVALID, "tally of a snapshot cannot"),
    ],
)
def test_a_bad_snapshot_is_refused_on_all_ranks(rank, snapshot, error, text):
    with hpc.ConditionalAccumulator("float64", ()) as acc:
        found = raised(acc.restore, snapshot if rank == 0 else None)
        assert acc.global_step == 0
        meet()

    check_error(found, text, kind=error)
