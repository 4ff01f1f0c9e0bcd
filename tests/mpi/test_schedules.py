"""Schedules: sums against NumPy, for all ways to pass gradients and read results."""

import functools
import inspect
import random
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from hpcaccum import Layout, Reducer
from hpcaccum.reducer import selection
from hpcaccum.reducer.schedule import MessageSchedule

from ..common import every_pair
from .reducing import ALL, KINDS, OPTIONS, SMALL, Maker, check, drawn, parts_of
from .support import meet, together

# Some four buckets of float32; an array of several, and several arrays in one.
SHAPES = {
    "scalar": (),
    "large": (23, 29),
    "empty": (0, 3),
    "vector": (33,),
    "matrix": (5, 7),
}


def in_place(reducer, arrays, weight=1.0):
    own = reducer.arrays()
    for name, array in arrays.items():
        own[name][...] = array
    return reducer.reduce({name: own[name] for name in arrays}, weight=weight)


def copied(reducer, arrays, weight=1.0):
    return reducer.reduce(arrays, weight=weight)


def partly(reducer, arrays, weight=1.0):
    own = reducer.arrays()
    given = {
        name: own[name] if n % 2 else a for n, (name, a) in enumerate(arrays.items())
    }
    for name, array in arrays.items():
        if given[name] is own[name]:
            own[name][...] = array
    return reducer.reduce(given, weight=weight)


def strided(reducer, arrays, weight=1.0):
    given = {
        name: np.stack([array, array], -1)[..., 1] for name, array in arrays.items()
    }
    return reducer.reduce(given, weight=weight)


def by_columns(reducer, arrays, weight=1.0):
    return reducer.reduce({n: a.copy("F") for n, a in arrays.items()}, weight=weight)


def narrowed(reducer, arrays, weight=1.0):
    # These values are not rounded.
    given = {n: a.astype(np.float64) for n, a in arrays.items()}
    return reducer.reduce(given, weight=weight)


def copied_out(reducer, arrays, weight=1.0):
    out = {name: np.full(array.shape, 7, np.float64) for name, array in arrays.items()}
    found = reducer.reduce(arrays, out=out, weight=weight)
    return {name: array.astype(found[name].dtype) for name, array in out.items()}


def over_itself(reducer, arrays, weight=1.0):
    mine = {name: array.astype(wide(reducer)) for name, array in arrays.items()}
    reducer.reduce(mine, out=mine, weight=weight)
    return mine


def out_by_columns(reducer, arrays, weight=1.0):
    out = {n: np.empty(a.shape, wide(reducer), order="F") for n, a in arrays.items()}
    reducer.reduce(arrays, out=out, weight=weight)
    return {name: a.copy("C") for name, a in out.items()}


def one_by_one(reducer, arrays, weight=1.0):
    names = sorted(arrays, key=lambda name: hash((name, MPI.COMM_WORLD.rank)))
    for n, name in enumerate(names):
        if n % 2:
            reducer.start(name, arrays[name], weight=weight)
        else:
            reducer.arrays()[name][...] = arrays[name]
            reducer.start(name, weight=weight)
    return reducer.wait(weight=weight)


def some_first(reducer, arrays, weight=1.0):
    first, *others = arrays
    reducer.start(first, arrays[first], weight=weight)
    return reducer.reduce({name: arrays[name] for name in others}, weight=weight)


def wide(reducer):
    return next(iter(reducer.results().values())).dtype


WAYS = [
    in_place,
    copied,
    partly,
    strided,
    by_columns,
    narrowed,
    copied_out,
    over_itself,
    out_by_columns,
    one_by_one,
    some_first,
]


def check_ways(
    maker, reducer, ways, shapes=SHAPES, dtype=np.float32, first=0, **options
):
    rank, size = maker.group.rank, maker.group.size
    for call, way in enumerate(ways, first):
        parts = parts_of(shapes, size, call, dtype=dtype)
        check(maker, way(reducer, parts[rank]), parts, dtype, **options)


def check_all_ways(maker, dtype, alike=WAYS):
    """Compare calls that all ranks make alike, then those of each rank in its way."""
    reducer, rank = maker(SHAPES, dtype), maker.group.rank
    check_ways(maker, reducer, alike, dtype=dtype)
    own = [WAYS[(3 * rank + 7 * call) % len(WAYS)] for call in range(6)]
    check_ways(maker, reducer, own, dtype=dtype, first=100)


@ALL
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16], ids=str
)
def test_means_equal_numpy_however_ranks_contribute(maker, dtype):
    # Which memory is copied where does not depend on the dtype.
    alike = WAYS if dtype == "float32" else [in_place, over_itself]
    check_all_ways(maker, dtype, alike)


@ALL
def test_integers_and_booleans_are_converted_to_floats(maker, rank, size):
    reducer = maker({"i": (300,), "b": (2,)}, reduction_type="SUM")
    found = reducer.reduce({"i": np.arange(300) + rank, "b": [True, False]})

    np.testing.assert_array_equal(found["i"], np.arange(300) * size + sum(range(size)))
    assert found["b"].tolist() == [size, 0]


@pytest.mark.parametrize(
    "maker",
    [
        "shared",
        "staged",
        "flat",
        "hierarchical",
        "hierarchical apart",
        "hierarchical singles",
        "hierarchical uneven",
    ],
    indirect=True,
)
# Elements: of one bucket and of several, with and without a short one, and stripes
# that are empty or short.
@pytest.mark.parametrize("length", [1, 3, 257, 3 * 256, 4 * 256 - 1])
def test_any_number_of_buckets(maker, length):
    shapes = {"x": (length,)}
    reducer = maker(shapes)
    assert reducer.statistics().buckets == -(-(-(-length // 16) * 16) // 256)
    ways = copied, in_place, over_itself, copied, one_by_one
    check_ways(maker, reducer, ways, shapes)


@ALL
def test_nothing_at_all(maker):
    reducer = maker({})
    empty = maker({"x": (0,)})

    assert (
        dict(reducer.reduce()) == dict(reducer.reduce({})) == dict(reducer.wait()) == {}
    )
    assert empty.reduce()["x"].shape == (0,)
    empty.start("x")
    assert empty.wait()["x"].shape == (0,)


@ALL
def test_the_same_bits_every_time_and_everywhere(maker, rank):
    reducer = maker(SHAPES)
    mine = drawn(SHAPES, rank, dtype=np.float32)
    bits = set()
    for way in [in_place, copied, one_by_one, copied] * 3:
        found = way(reducer, mine)
        bits |= set(meet(b"".join(found[name].tobytes() for name in SHAPES)))

    # MPI may sum in another order each time.
    assert len(bits) == 1 or maker.kind == "flat"


@pytest.mark.parametrize(
    ("maker", "dtype", "wire"),
    every_pair(
        ["hierarchical", "hierarchical apart", "hierarchical uneven"],
        ["float32", "float64"],
        ["float16", ml_dtypes.bfloat16],
    ),
    indirect=["maker"],
    ids=str,
)
@pytest.mark.ranks(min=2)
def test_sums_travel_in_the_wire_format(maker, wire, dtype):
    reducer = maker(SHAPES, dtype, wire_dtype=wire)
    assert reducer.statistics().wire_dtype == str(np.dtype(wire))
    ways = copied, in_place, over_itself, one_by_one
    check_ways(maker, reducer, ways, dtype=dtype, wire=wire)
    assert len(set(meet(reducer.results()["large"].tobytes()))) == 1


@ALL
def test_infinity_and_nan_are_summed_like_other_numbers(maker, rank):
    reducer = maker({"x": (400,)}, "float32")
    mine = np.ones(400, np.float32)
    mine[:3] = np.inf, -np.inf if rank == 0 else np.inf, np.nan
    mine[-2:] = 3e38, 1e-45
    parts = meet(mine)
    for way in [in_place, copied, copied_out]:
        found = way(reducer, {"x": mine})
        assert found["x"][0] == np.inf
        assert np.isnan(found["x"][2])
        expected = maker.expected(parts, np.float32)
        np.testing.assert_allclose(found["x"], expected, 1e-6)


@ALL
def test_an_overflow_becomes_infinity(maker):
    reducer = maker({"x": (300,)}, reduction_type="SUM")
    out = {"x": np.zeros(300, np.float16)}
    found = reducer.reduce({"x": np.full(300, 1e300)}, out=out)

    assert (found["x"] == np.inf).all()
    reducer.reduce({"x": np.full(300, 1e30, np.float32)}, out=out)
    assert (out["x"] == np.inf).all()
    reducer.start("x", np.full(300, -1e300))
    assert (reducer.wait()["x"] == -np.inf).all()


def delayed(reducer, seed):
    """Delay this rank at random in all that other ranks could depend on."""
    chance = random.Random(seed)

    def slow(call):
        def run(*args, **kwargs):
            if (number := chance.random()) < 0.1:
                time.sleep(0.01 if number < 0.01 else 0.005 * number)
            return call(*args, **kwargs)

        return run

    schedule = reducer._schedule
    names = "_sum", "_peers", "_staging"
    parts = [schedule, *(getattr(schedule, name, None) for name in names)]
    parts += [part._words for part in parts if hasattr(part, "_words")]
    for part in filter(None, parts):
        for name, _ in inspect.getmembers(type(part), inspect.isfunction):
            if not name.startswith("__"):
                setattr(part, name, slow(getattr(part, name)))


@ALL
def test_late_ranks_do_not_change_a_sum(maker, rank, size):
    reducer = maker({"x": (1500,), "y": (40,)})
    delayed(reducer, rank)
    chance = random.Random(rank + 50)
    for call in range(12):
        parts = parts_of({"x": (1500,), "y": (40,)}, size, call, dtype=np.float32)
        found = chance.choice(WAYS)(reducer, parts[rank])
        check(maker, found, parts, np.float32)
        time.sleep(chance.choice([0, 0, 0.001, 0.005]))
        # Other ranks may have begun the next call.
        check(maker, found, parts, np.float32)


@ALL
def test_results_stay_until_this_rank_begins_again(maker, rank, size):
    reducer = maker(SHAPES)
    before, after = (parts_of(SHAPES, size, n, dtype=np.float32) for n in (1, 2))
    for first in (in_place, copied, one_by_one):
        found = first(reducer, before[rank])
        for late in {0, size - 1}:
            if rank != late:
                for name, array in reversed(after[rank].items()):
                    reducer.start(name, array)
            meet()
            if rank == late:
                check(maker, found, before, np.float32)
                for name, array in after[rank].items():
                    reducer.start(name, array)
            check(maker, reducer.wait(), after, np.float32)
            found = first(reducer, before[rank])


@st.composite
def cases(draw):
    shape = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    names = st.sampled_from("abcdefgh")
    shapes = draw(st.dictionaries(names, shape, min_size=1, max_size=6))
    ways = st.lists(st.sampled_from(WAYS), min_size=4, max_size=4)
    some = st.sets(st.sampled_from(sorted(shapes)), min_size=1)
    return {
        "shapes": shapes,
        "dtype": draw(st.sampled_from(["float16", "float32", "float64"])),
        "bucket": draw(st.sampled_from([SMALL, 1500, 4096, 1 << 20])),
        "calls": draw(st.lists(st.tuples(ways, some), min_size=1, max_size=4)),
        "mean": draw(st.booleans()),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_contributed_in_any_way(comm, rank, size, kind):
    Maker(comm, kind).free()  # may skip

    @settings(max_examples=6)
    @given(cases())
    @together
    def run(case):
        maker = Maker(comm, kind)
        options = {} if kind == "one-shot" else {"bucket_bytes": case["bucket"]}
        options["reduction_type"] = "MEAN" if case["mean"] else "SUM"
        reducer = maker(case["shapes"], case["dtype"], **options)
        for call, (ways, names) in enumerate(case["calls"]):
            parts = [
                {name: array for name, array in part.items() if name in names}
                for part in parts_of(case["shapes"], size, call, dtype=case["dtype"])
            ]
            found = ways[rank % 4](reducer, parts[rank])
            check(maker, found, parts, case["dtype"], mean=case["mean"])
        maker.free()

    run()


# A schedule is added by one class, with two methods, and one line in the list


class Toy(MessageSchedule):
    """Gathers each bucket to rank 0, sums it there, and broadcasts the sums."""

    name = "toy"
    default_bucket_bytes = 2 * SMALL

    def __init__(self, plan):
        super().__init__(plan)
        self._gathering = []

    def offer(self, count):
        for bucket in self.buckets[len(self._gathering) : count]:
            mine = self.sent[bucket].astype(self.received.dtype)
            parts = np.empty((self._comm.size, mine.size), mine.dtype)
            self._gathering.append((self._comm.Igather(mine, parts), mine, parts))

    def collect(self, number):
        request, _, parts = self._gathering[number]
        self._wait(request.Test)
        total = self.received[self.buckets[number]]
        if self._comm.rank == 0:
            with np.errstate(all="ignore"):
                total[...] = functools.reduce(np.add, parts)
        self._wait(self._comm.Ibcast(total).Test)
        self._divide(self.buckets[number])
        if number + 1 == len(self.buckets):
            self._gathering.clear()


@pytest.fixture
def toy(monkeypatch):
    choose = selection.choose
    monkeypatch.setattr(selection, "SCHEDULES", [*selection.SCHEDULES, Toy])
    monkeypatch.setattr(
        selection,
        "choose",
        lambda name, case: Toy if name == "toy" else choose(name, case),
    )


def test_another_schedule_has_its_own_size_of_a_bucket(comm, toy):
    layout = Layout({"x": (3 * SMALL,)}, "float32")
    with Reducer(layout, comm, schedule="toy") as reducer:
        assert reducer.statistics().schedule == "toy"
        assert reducer.statistics().buckets == 6


@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16], ids=str)
def test_its_means_equal_numpy_however_ranks_contribute(comm, dtype, monkeypatch, toy):
    monkeypatch.setitem(OPTIONS, "toy", {"schedule": "toy", "bucket_bytes": SMALL})
    maker = Maker(comm, "toy")
    maker.nodes = [range(comm.size)]
    check_all_ways(maker, dtype)
    maker.free()
