"""Reducer: arrays that share memory with each other or with the reducer."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcaccum import InvalidArgumentError, Layout

from ..common import every_pair
from .reducing import ALL, KINDS
from .training import meet

pytestmark = pytest.mark.any_size

# Six buckets of 256 elements, each array in two or three of them.
COUNT = 500
SHAPES = dict.fromkeys("xyz", (COUNT,))
LAYOUT = Layout(SHAPES, "float32")


def at(address, count, dtype=np.float32):
    """Return memory as an array, by its address."""
    dtype = np.dtype(dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def address(array):
    return array.__array_interface__["data"][0]


def filled(array, *seed):
    """Fill with numbers that are finite also if they are read as float64."""
    array[...] = 1 + np.random.default_rng(seed).random(array.shape)


FORMS = {
    "plain": lambda flat, start: flat[start : start + COUNT],
    "reversed": lambda flat, start: flat[start : start + COUNT][::-1],
    "every second": lambda flat, start: flat[start : start + 2 * COUNT : 2],
    "memoryview": lambda f, start: np.asarray(memoryview(f[start : start + COUNT])),
    "address": lambda f, start: at(address(f) + start * f.itemsize, COUNT, f.dtype),
    "float64": lambda f, start: at(address(f) + start * 4, COUNT, np.float64),
}
STARTS = st.sampled_from([0, 512, 1024, 1, 250, 500])
# The memory and the forms of all inputs. Most are dense and outside the reducer's own
# memory: these are copied by pieces.
WHERE = st.sampled_from([["user"], ["user", "own"], ["user", "results"]])
DENSE = ["plain", "memoryview", "address"]


def places(where, forms):
    return st.tuples(st.sampled_from(where), STARTS, st.sampled_from(forms))


@st.composite
def drawn_calls(draw):
    """Draw the place of each input and target, and how many inputs are started."""
    started = draw(st.sampled_from([0, 0, 0, 1, 3]))
    # `start` overwrites the last results.
    where = draw(WHERE if not started else st.just(["user", "own"]))
    forms = draw(st.sampled_from([DENSE, DENSE, [*FORMS]]))
    place = places(where, forms)
    inputs = {name: draw(place) for name in draw(st.permutations("xyz"))}
    same = st.sampled_from([*inputs.values()])
    anywhere = st.one_of(same, same, places(["user", "own", "results"], forms))
    targets = draw(st.dictionaries(st.sampled_from("xyz"), anywhere))
    return inputs, targets, started


class Memory:
    """The flat memory of a reducer's arrays and results, and some of the user's."""

    def __init__(self, reducer, rank):
        self.made = {}
        own, results = reducer.arrays()["x"], reducer.results()["x"]
        self.flat = {
            "own": at(address(own), LAYOUT.size),
            "user": np.empty(LAYOUT.size, np.float32),
            "results": at(address(results), LAYOUT.size),
        }
        for number, (name, flat) in enumerate(self.flat.items()):
            filled(flat, number, 0 if name == "results" else rank)
        meet()

    def array(self, place):
        """Return the array at a place; it is moved to the front if necessary."""
        if place not in self.made:
            self.made[place] = self.make(place)
        return self.made[place]

    def make(self, place):
        where, start, form = place
        if form in ("every second", "float64"):
            start = min(start, LAYOUT.size - 2 * COUNT) // 2 * 2
        start = min(start, LAYOUT.size - COUNT)
        return FORMS[form](self.flat[where], start)

    def refuses(self, out):
        """Whether targets share memory with the results or with each other."""
        arrays = [*out.values()]
        pairs = [(a, b) for i, a in enumerate(arrays) for b in arrays[:i]]
        pairs += [(a, self.flat["results"]) for a in arrays]
        return any(np.shares_memory(a, b) for a, b in pairs)


def reduced(reducer, started, inputs, out):
    """Reduce; return what this rank contributed, and the results or the error."""
    parts = {}
    for name, array in started.items():
        parts[name] = np.array(array, np.float32)
        reducer.start(name, array)
    parts |= {name: np.array(array, np.float32) for name, array in inputs.items()}
    try:
        found = reducer.reduce(inputs, out=out)
    except InvalidArgumentError as error:
        return parts, error
    return parts, {name: array.copy() for name, array in found.items()}


@pytest.fixture
def reducers(makers):
    return [(maker, maker(SHAPES)) for maker in makers]


# Not parametrized: to draw an example takes longer than to reduce.
@settings(max_examples=12)
@given(drawn=drawn_calls())
def test_any_aliasing_is_right_or_refused(reducers, comm, rank, drawn):
    for maker, reducer in reducers:
        right_or_refused(maker, comm, reducer, Memory(reducer, rank), *drawn)


def right_or_refused(maker, comm, reducer, memory, places, targets, first=0):
    """Make one call; compare with NumPy's results from copies made before it."""
    names = [*places]
    arrays = {name: memory.array(place) for name, place in places.items()}
    started = {name: arrays[name] for name in names[:first]}
    inputs = {name: arrays[name] for name in names[first:]}
    out = {name: memory.array(place) for name, place in targets.items()}
    parts, found = reduced(reducer, started, inputs, out)
    everybody = comm.allgather(parts)

    refused = isinstance(found, InvalidArgumentError)
    assert refused == memory.refuses(out), found
    if not refused:
        for name in SHAPES:
            mean = maker.expected([each[name] for each in everybody], np.float32)
            maker.check(found[name], mean)
            if name in out:
                maker.check(np.array(out[name], np.float32), mean)
    meet()


# The order of the inputs matters in memory of the reducer. That of the user takes one
# way whatever the order is: each of both with each reducer is enough.
PLACES = [
    *every_pair(KINDS, ["own", "results"], [0, 1, 2]),
    *((kind, "user", number % 3) for number, kind in enumerate(KINDS)),
]


@pytest.mark.parametrize(("maker", "where", "turn"), PLACES, indirect=["maker"])
def test_arrays_may_change_places(maker, comm, rank, where, turn):
    reducer = maker(SHAPES)
    starts = [*LAYOUT.offsets.values()]
    for out in (None, "own", "user", "results"):
        # Their order matters only if inputs are in the same memory, or copied to it.
        for back in range(3) if out in (where, "own") else (0,):
            memory = Memory(reducer, rank)
            places, targets = {}, {}
            for number, name in enumerate(SHAPES):
                start, target = starts[number - turn], starts[number - back]
                places[name] = (where, start, "address")
                if out:
                    targets[name] = (out, target, "address")
            right_or_refused(maker, comm, reducer, memory, places, targets)


@ALL
def test_targets_that_share_memory_are_refused_on_all(maker, rank, size):
    reducer = maker(SHAPES)
    flat = np.zeros(2 * COUNT, np.float32)
    wrong = [
        ({"x": flat[:COUNT], "y": flat[1 : COUNT + 1]}, "'x' and 'y' share memory"),
        ({"x": flat[:COUNT], "y": flat[:COUNT][::-1]}, "'x' and 'y' share memory"),
        ({"x": flat[::2], "z": flat[::-2][::-1][::-1]}, None),
        ({"y": at(address(reducer.results()["y"]), COUNT)}, "'y' is the memory of"),
    ]
    for out, message in wrong:
        mine = {name: np.ones(COUNT, np.float32) for name in SHAPES}
        if message is None:
            reducer.reduce(mine, out=out)
            assert (flat == 1).all()
            continue
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            reducer.reduce(mine, out=out if rank == 0 else None)
        assert rank == 0 or "rank 0" in str(caught.value)


@ALL
def test_targets_are_checked_again_when_they_change(maker, size):
    reducer = maker(SHAPES)
    flat = np.zeros((3, COUNT), np.float32)
    mine = {name: np.ones(COUNT, np.float32) for name in SHAPES}
    out = dict(zip("xyz", flat, strict=True))
    for _ in range(3):
        reducer.reduce(mine, out=out)
    out["y"] = flat[2]

    with pytest.raises(InvalidArgumentError, match="'y' and 'z' share memory"):
        reducer.reduce(mine, out=out)
    reducer.reduce(mine, out={"x": flat[2], "z": flat[0]})
    assert (flat[[0, 2]] == 1).all()
