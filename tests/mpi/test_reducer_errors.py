"""Reducer: every way in which ranks can disagree, and the errors on all of them."""

import itertools
import re
import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError, Layout, Reducer, group_of
from hpcaccum.mpi.job import process

from ..common import check_error, every_pair
from .acting import everywhere
from .reducing import EACH, ONES, SCHEDULES, SHAPES, Maker, made_up, works
from .training import raised

pytestmark = pytest.mark.any_size

# Arguments of the reducer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "ring"}, "one of .*'auto', 'shared', 'hier"),
        ({"reduction_type": "mean"}, "reduction_type must be"),
        ({"wire_dtype": "float32"}, "narrower than float32"),
        ({"wire_dtype": "int8"}, "wire_dtype must be one of"),
        ({"wire_dtype": "nonsense"}, "wire_dtype must name a float"),
        ({"wire_dtype": "float16", "schedule": "flat"}, "'hierarchical', not 'flat'"),
        ({"cuda_aware": True}, "for schedule 'flat', got 'auto': the others"),
        ({"bucket_bytes": 1023}, "bucket_bytes must be 1024 to"),
        ({"bucket_bytes": 2**31}, "bucket_bytes must be"),
        ({"bucket_bytes": 1e6}, "bucket_bytes must be"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_on_all(comm, rank, size, options, message):
    error = TypeError if options == {"wire_dtype": "nonsense"} else InvalidArgumentError
    for wrong in (options, options if rank == size - 1 else {}):
        with pytest.raises(error, match=message):
            Reducer(Layout(SHAPES, "float32"), comm, **wrong)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"schedule": "flat"}, "schedule"),
        ({"reduction_type": "SUM"}, "reduction_type"),
        ({"wire_dtype": "float16"}, "wire_dtype"),
        ({"bucket_bytes": 4096}, "bucket_bytes"),
    ],
    ids=str,
)
def test_options_that_differ_are_refused_on_all(comm, rank, options, fact):
    with pytest.raises(DisagreementError, match=f"{fact} must be the same"):
        Reducer(Layout(SHAPES, "float32"), comm, **(options if rank == 0 else {}))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("other", "both"),
    [
        ({"x": (900,)}, ["('y', 'float32', (300,))", "nothing"]),
        (
            {"y": (300,), "x": (900,)},
            ["('x', 'float32', (900,))", "('y', 'float32', (300,))"],
        ),
    ],
)
def test_layouts_that_differ_are_refused_on_all(comm, rank, other, both):
    with pytest.raises(DisagreementError) as caught:
        Reducer(Layout(SHAPES if rank == 0 else other, "float32"), comm)
    assert "rank 0 has {}, rank 1 has {}".format(*both) in str(caught.value)


def test_what_is_no_layout_is_refused_on_all(comm, rank, size):
    layout = SHAPES if rank == size - 1 else Layout(SHAPES, "float32")
    with pytest.raises(TypeError, match="layout must be a Layout, got dict"):
        Reducer(layout, comm)


@pytest.mark.ranks(min=2)
def test_memory_that_is_not_shared_is_refused_on_all(comm):
    maker = Maker(comm, "hierarchical")
    with pytest.raises(
        InvalidArgumentError, match=f"'shared' needs .* are on {len(maker.nodes)}"
    ):
        maker(SHAPES, schedule="shared", bucket_bytes=None)
    maker.free()


# Arguments of a call: invalid on one rank, an error on all, which continue


WRONG = {
    "name": ({"z": 1}, r"no array is named 'z', the names are 'x', 'y'"),
    "shape": ({"x": np.ones(899)}, r"'x' must have shape \(900,\), got \(899,\)"),
    "broadcast": ({"x": 1.0}, r"'x' must have shape"),
    "nothing": ({"x": None}, "'x' must be an array"),
    "ragged": ({"x": [[1], [2, 3]]}, "'x' is not an array"),
    "complex": ({"x": np.ones(900, complex)}, "cannot be cast"),
    "mask": ({"x": np.ma.ones(900)}, "'x' must have no mask"),
}
FROZEN = np.ones(900)
FROZEN.flags.writeable = False
WRONG_OUT = {
    "name": ({"z": np.ones(900)}, "no array is named 'z'"),
    "shape": ({"x": np.ones(899)}, "out 'x' must have shape"),
    "list": ({"x": [0.0] * 900}, "out 'x' must be a writable array"),
    "frozen": ({"x": FROZEN}, "out 'x' must be a writable array"),
    "masked": ({"x": np.ma.zeros(900)}, "out 'x' must have no mask"),
    "integers": ({"x": np.ones(900, int)}, "out 'x' must be of floats"),
}


def check_failure(error, message, failing, rank):
    assert type(error) is InvalidArgumentError
    assert re.search(message, str(error))
    assert rank == failing or f"rank {failing}" in str(error)


@EACH
def test_an_array_that_does_not_fit_is_refused_on_all(maker, rank, size):
    reducer = maker(SHAPES)
    for failing in {0, size - 1}:
        for given, message in WRONG.values():
            call = {**ONES, **given} if rank == failing else ONES
            check_failure(raised(reducer.reduce, call), message, failing, rank)
        works(reducer, size)


@EACH
def test_an_out_that_does_not_fit_is_refused_on_all(maker, rank, size):
    reducer = maker(SHAPES)
    for out, message in WRONG_OUT.values():
        mine = out if rank == 0 else None
        check_failure(raised(reducer.reduce, ONES, out=mine), message, 0, rank)
        for name, array in ONES.items():
            reducer.start(name, array)
        check_failure(raised(reducer.wait, out=mine), message, 0, rank)
    works(reducer, size)


@EACH
def test_other_arguments_that_do_not_fit_are_refused_on_all(maker, rank, size):
    reducer = maker(SHAPES)
    kind = "mean" if rank == 0 else "MEAN"
    error = raised(reducer.reduce, ONES, reduction_type=kind)
    check_failure(error, "reduction_type must be one of", 0, rank)
    for weight in (0, np.nan, None):
        error = raised(reducer.reduce, ONES, weight=weight if rank == 0 else 2)
        check_failure(error, "weight must be a finite number above 0", 0, rank)
    for step in (None, "1", [1, 2]):
        mine = step if rank == 0 else 0
        error = raised(reducer.reduce, ONES, step=mine)
        check_failure(error, "step must be one number", 0, rank)
        reducer.start("x", ONES["x"])
        error = raised(reducer.wait, step=mine)
        check_failure(error, "step must be one number", 0, rank)
    for step in (1.5, np.float64(2), np.array(3), True):
        assert (reducer.reduce(ONES, step=step)["x"] == 1).all()
    works(reducer, size)


@EACH
def test_start_refuses_on_this_rank_and_changes_nothing(maker, size):
    reducer = maker(SHAPES)
    reducer.start("y", ONES["y"])
    for given, message in WRONG.values():
        for name, array in given.items():
            if name == "z" or array is not None:
                with pytest.raises(InvalidArgumentError, match=message):
                    reducer.start(name, array)
    with pytest.raises(InvalidArgumentError, match="'y' has already been started"):
        reducer.start("y", np.zeros(300))
    reducer.start("x", ONES["x"])
    assert all((array == 1).all() for array in reducer.wait().values())
    works(reducer, size)


@EACH
def test_started_arrays_are_contributed_once_and_in_one_way(maker, size):
    reducer = maker(SHAPES)
    reducer.start("y", ONES["y"])
    error = raised(reducer.reduce, ONES)
    check_error(error, "'y' has already been started")
    works(reducer, size)
    for name, array in ONES.items():
        reducer.start(name, array)
    error = raised(reducer.reduce, {}, reduction_type="SUM")
    assert type(error) is InvalidArgumentError or size == 1
    works(reducer, size)


@EACH
@pytest.mark.ranks(min=2)
def test_an_array_that_only_some_contribute_is_an_error_on_all(maker, rank, size):
    reducer = maker(SHAPES)
    for absent in (0, size - 1):
        error = raised(reducer.reduce, {"x": ONES["x"]} if rank == absent else ONES)
        if rank != absent:
            reducer.start("y")
        reducer.start("x")
        again = raised(reducer.wait)

        for each in (error, again):
            check_error(each, "gradient of y must be the same", kind=DisagreementError)
            first, last = ("none", "one") if absent == 0 else ("one", "none")
            assert f"rank 0 has {first}" in str(each)
            assert f"has {last}" in str(each)
        works(reducer, size)


def pairs_of_sets(number):
    """Return pairs of different sets of so many names."""
    every, random = set(range(number)), np.random.default_rng(number)
    drawn = [set(np.flatnonzero(random.random(number) < 0.5)) for _ in range(12)]
    found = [*itertools.pairwise(drawn)]
    for k in (0, number - 1):
        found += [(every, every - {k}), ({k}, {(k + 1) % number})]
    return [(a, b) for a, b in found if a and b and a != b]


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("maker", "number"),
    [*((kind, 30) for kind in SCHEDULES), ("flat", 2), ("one-shot", 200)],
    indirect=["maker"],
)
def test_no_two_sets_of_arrays_are_taken_for_the_same(maker, rank, size, number):
    arrays = [(f"{each}", np.ones(4, np.float32)) for each in range(number)]
    reducer = maker({name: array.shape for name, array in arrays})
    for turn, (some, others) in enumerate(pairs_of_sets(number)):
        given = others if rank == turn % size else some
        error = raised(reducer.reduce, dict(arrays[each] for each in given))
        assert type(error) is DisagreementError, (some, others)
        first = min(some ^ others)
        assert f"gradient of {first} must be the same" in str(error)
        if turn % 4 == 0:
            found = reducer.reduce(dict(arrays[each] for each in some))
            assert {int(name) for name in found} == some
            assert all((array == 1).all() for array in found.values())


@EACH
@pytest.mark.ranks(min=2)
def test_disagreements_are_found_however_ranks_are_apart(maker, rank, size):
    reducer, plan = maker(SHAPES), np.random.default_rng(5)
    own = np.random.default_rng(rank)
    for step in range(80):
        odd = plan.integers(size) if plan.random() < 0.25 else None
        if own.random() < 0.1:
            time.sleep(own.random() / 2000)
        given = {"x": ONES["x"]} if rank == odd else ONES
        found = raised(reducer.reduce, given, step=step)
        assert isinstance(found, DisagreementError) is (odd is not None), step


@EACH
@pytest.mark.ranks(min=2)
def test_a_rank_at_another_step_or_with_another_reduction_is_found(maker, rank, size):
    reducer = maker(SHAPES)
    reducer.reduce(ONES, step=3)
    for way in (ONES, None):
        error = raised(reducer.reduce, way, step=4 if rank < size - 1 else 5)
        assert type(error) is DisagreementError
        assert f"step must be the same on all {size} ranks" in str(error)
        assert f"rank 0 has 4, rank {size - 1} has 5" in str(error)
    # These are 5 on average.
    for options in (
        {"step": {0: 4, 1: 6}.get(rank, 5)},
        {"reduction_type": "SUM" if rank == 0 else "MEAN"},
    ):
        assert type(raised(reducer.reduce, **options)) is DisagreementError
    works(reducer, size)
    # All may fail at once.
    mine = ValueError("mine")
    assert raised(reducer.fail, mine) is mine
    works(reducer, size)


@EACH
@pytest.mark.ranks(min=2)
def test_a_rank_with_another_number_is_found(maker, rank, size):
    reducer, last = maker(SHAPES), size - 1
    reducer.compare({"rate": 0.1, "epoch": 7})
    works(reducer, size)
    for numbers, text in (
        ({"rate": 0.1, "epoch": 7 + (rank == last)}, "epoch must be the same"),
        ({"rate": [0.1, 0.25][rank == last]}, f"rank 0 has 0.1, rank {last} has 0.25"),
        ({"rate": 0.1} if rank else {}, "rank 0 has nothing, rank 1 has 0.1"),
        ({"rate": -1 - (rank == last)}, f"rank 0 has -1, rank {last} has -2"),
        ({"rate": -1.0 - (rank == last)}, "rate must be the same"),
        ({"rate": 2**61 - 1 if rank == last else 0}, "rate must be the same"),
        ({"rate": 2**53 + (rank == last)}, "rate must be the same"),
        ({"rate": [0.5, np.nan][rank == last]}, "rate must be the same"),
        ({"rate": [0.5, np.nextafter(0.5, 1)][rank == last]}, "rate must be the same"),
        ({["a", "b"][rank == last]: 1}, "a must be the same"),
    ):
        reducer.compare(numbers)
        check_error(raised(reducer.reduce, ONES), text, kind=DisagreementError)
    reducer.compare({})
    works(reducer, size)


@EACH
def test_equal_numbers_of_other_types_are_the_same(maker, rank, size):
    reducer = maker(SHAPES)
    for numbers in ([1, 1.0], [float("nan"), np.float32("nan")], [0.0, -0.0]):
        reducer.compare({"rate": numbers[rank % 2], "epoch": np.int64(rank - rank)})
        works(reducer, size)


@pytest.mark.parametrize(
    ("maker", "others", "which"),
    every_pair(SCHEDULES, ["reduce", "copy", "start"], ["first", "last"]),
    indirect=["maker"],
)
def test_a_failure_of_one_rank_is_raised_on_all(maker, rank, size, which, others):
    failing = 0 if which == "first" else size - 1
    reducer = maker(SHAPES)
    for mine in (InvalidArgumentError("no"), TypeError("no"), KeyError("no")):
        if rank == failing:
            if others == "start":
                reducer.start("y")
            assert raised(reducer.fail, mine) is mine
            continue
        if others == "start":
            for name in ONES:
                reducer.start(name)
            error = raised(reducer.wait)
        else:
            error = raised(reducer.reduce, ONES if others == "copy" else None)
        known = type(mine) if type(mine) is not KeyError else RuntimeError
        check_error(error, f"rank {failing}", "no", kind=known)
    works(reducer, size)


# What on_loss="shrink" does not allow


def optimizer(comm, **options):
    return hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm, on_loss="shrink", **options)


def reducer(comm, **options):
    layout = Layout({"a": (3,)}, "float32")
    return Reducer(layout, comm, on_loss="shrink", **options)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("make", [optimizer, reducer])
@pytest.mark.parametrize("schedule", ["flat", "hierarchical", "nccl"])
def test_other_schedules_are_refused(comm, make, schedule):
    error = raised(make, comm, schedule=schedule)

    check_error(error, f"is for schedule 'auto' or 'shared', not '{schedule}'")


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("make", [optimizer, reducer])
def test_several_nodes_are_refused(comm, make):
    group = group_of(comm)
    if group.single_node:
        group = made_up(comm, "halves")
    check_error(raised(make, group), "needs all ranks on one node, they are on ")


@pytest.mark.ranks(min=2)
def test_ranks_that_do_not_see_each_other_are_refused(one_node, rank, monkeypatch):
    # A process of another container.
    own = process.Process.own()._replace(started="?" if rank == 0 else "")
    monkeypatch.setattr(process.Process, "own", lambda: own)
    other = one_node.comm.Dup()
    error = raised(optimizer, other)
    other.Free()

    assert "needs ranks that see each other's processes" in str(error)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ["sparse", "device"])
def test_variables_that_are_sparse_or_on_a_device_are_refused(one_node, request, kind):
    w = hpc.Variable(np.zeros((4, 2)), "w", sparse=kind == "sparse")
    if kind == "device":
        w = hpc.Variable(request.getfixturevalue("cp").zeros(3, np.float32), "w")
    opt = optimizer(one_node)
    error = raised(opt.initialize, [w])

    check_error(error, "'shrink' is not for variables that are on a device, or sparse")
    everywhere(opt.free)
