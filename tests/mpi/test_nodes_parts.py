"""NodeParts: memory of each rank on its node, and sums of it for any rank."""

from __future__ import annotations

import itertools
import signal
import threading

import numpy as np
import pytest

from hpcaccum import Group, WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import NodeParts
from hpcaccum.nodes import transfer as module

from .acting import VAIN, Background, at, everywhere, same_bits, until
from .interrupting import at_each_point, interrupt
from .on_nodes import group_on_nodes, held_agent, named  # noqa: F401
from .support import WAIT, meet
from .training import raised

F8 = np.dtype("f8")
# Elements of a vector, and of a piece of it in these tests.
COUNT, PIECE = 21, 5


@pytest.fixture(params=[COUNT * 8, module._PIECE], ids=["one piece", "pieces"])
def pieces(request, monkeypatch):
    """Send vectors in one piece or in several; in both cases one element is left."""
    size = request.param if request.param > COUNT * 8 else PIECE * 8
    monkeypatch.setattr(module, "_PIECE", size)


@pytest.fixture
def make(group):
    """Return a function that makes parts; all are freed at the end."""
    made = []

    def make(nbytes=COUNT * 8, **options):
        made.append(NodeParts(group, nbytes, "test", **options))
        return made[-1]

    yield make
    meet()
    for parts in made:
        parts.free()


def values(rank, count=COUNT, dtype=F8, seed=0):
    """Return the vector of a rank: numbers whose sum depends on the order."""
    random = np.random.default_rng([rank, seed])
    exponents = random.integers(-8, 8, count)
    return (random.standard_normal(count) * 10.0**exponents).astype(dtype)


def fill(parts, rank, offset=0, **options):
    """Write the vector of this rank to its part; wait until all have."""
    vector = values(rank, **options)
    parts.view((rank, offset), vector.size, vector.dtype)[:] = vector
    meet()


def total(parts, places, count=COUNT, dtype=F8, divisor=1, timeout=WAIT):
    """Return a copy of a sum."""
    return parts.sum(places, count, dtype, divisor, Deadline(timeout, "test")).copy()


def expected(group, ranks, count=COUNT, dtype=F8, divisor=1, seed=0):
    """Return the sum over nodes with NumPy only: each node first, then in order."""
    nodes = [
        [values(rank, count, dtype, seed) for rank in node if rank in ranks]
        for node in group.nodes
    ]
    sums = [sum(vectors[1:], vectors[0]) for vectors in nodes if vectors]
    result = sum(sums[1:], sums[0])
    if divisor & (divisor - 1) == 0:
        return result * dtype.type(1 / divisor)
    return result / dtype.type(divisor)


def subsets(size):
    everybody = range(size)
    return itertools.chain.from_iterable(
        itertools.combinations(everybody, number) for number in range(1, size + 1)
    )


def test_ranks_of_one_node_have_all_parts_and_no_agent(comm, rank, size):
    group, before = Group.of(comm), threading.active_count()
    if not group.single_node:
        pytest.skip("the ranks are on several nodes")
    parts = NodeParts(group, 40, "test")
    parts.view((rank, 8), 4, F8)[:] = rank
    meet()

    assert parts.mapped
    assert threading.active_count() == before
    assert "agent" not in group.named
    assert parts.nbytes_here == 64
    for other in range(size):
        assert parts.is_here(other)
        assert parts.view((other, 0), 5, F8).tolist() == [0, *[other] * 4]
    meet()
    parts.free()


def test_each_node_has_the_parts_of_its_ranks(make, group, rank, size):
    parts = make(100)
    mine = group.node_ranks

    assert [other for other in range(size) if parts.is_here(other)] == mine
    for other in mine:
        assert not parts.view((other, 0), 16, F8).any()
    # The leader also has room for a result.
    assert parts.nbytes_here == 128 * (1 + (rank == mine[0]))
    assert not parts.mapped


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_any_rank_gets_the_sum_of_any_ranks(make, group, rank, size, dtype, pieces):
    # A result is valid until the next sum of a rank of this node from the same parts.
    dtype, several = np.dtype(dtype), [make() for _ in range(size)]
    for number, parts in enumerate(several):
        fill(parts, rank, dtype=dtype, seed=number)

    def take():
        return [
            total(several[rank], [(other, 0) for other in ranks], COUNT, dtype, divisor)
            for divisor, ranks in enumerate(subsets(size), 1)
        ]

    for seed, found in enumerate(everywhere(take)):
        for divisor, ranks in enumerate(subsets(size), 1):
            wanted = expected(group, ranks, COUNT, dtype, divisor, seed)
            same_bits(found[divisor - 1], wanted)


def test_vectors_of_any_number_of_pieces(make, group, rank, size, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", PIECE * 8)
    parts, places = make(9 * PIECE * 8), [(other, 0) for other in range(size)]
    fill(parts, rank, count=9 * PIECE)
    counts = [0, 1, PIECE, PIECE + 1, 4 * PIECE, 5 * PIECE - 1, 9 * PIECE]
    found = at(-1, lambda: [total(parts, places, count) for count in counts])
    whole = expected(group, range(size), 9 * PIECE)
    for count, result in zip(counts, found, strict=True):
        same_bits(result, whole[:count])


def test_long_vectors(make, group, rank, size):
    count = 3 * module._PIECE // 8 + 1
    parts = make(count * 8)
    fill(parts, rank, count=count)
    found = at(-1, total, parts, [(r, 0) for r in range(size)], count)
    same_bits(found, expected(group, range(size), count))


def test_places_begin_anywhere(make, group, rank, size):
    parts = make(1000)
    places = [(other, 64 * (1 + other)) for other in range(size)]
    fill(parts, rank, offset=places[rank][1])
    same_bits(at(0, total, parts, places), expected(group, range(size)))


def test_overflow_is_seen_in_the_result_only(make, group, rank, size):
    parts = make()
    parts.view((rank, 0), COUNT, F8)[:] = np.finfo(F8).max
    meet()
    with np.errstate(all="raise"):
        found = at(0, total, parts, [(0, 0), (size - 1, 0)])
    assert (found == np.inf).all()


def test_all_ranks_take_from_the_same_parts_at_a_time(make, group, rank, size):
    common, *several = [make() for _ in range(1 + size)]
    for number, parts in enumerate((*several, common)):
        fill(parts, rank, seed=number)

    def take():
        found = []
        for turn in range(3 * size):
            places = [(other, 0) for other in sorted({rank, turn % size})]
            # Ranks of a node overwrite this result of each other.
            total(common, places)
            found.append(total(several[rank], places))
        return found

    for taker, found in enumerate(everywhere(take)):
        for turn, result in enumerate(found):
            ranks = {taker, turn % size}
            same_bits(result, expected(group, ranks, seed=taker))
    turns = [at(taker, total, common, [(0, 0)]) for taker in (0, size - 1)]
    for result in turns:
        same_bits(result, expected(group, [0], seed=size))


def test_sum_that_was_given_up_does_not_disturb_the_next(
    make, held, group, rank, size, pieces
):
    parts = make()
    fill(parts, rank)
    everybody, last = [(other, 0) for other in range(size)], group.nodes[-1]
    with held:
        if rank == 0:
            late = [
                raised(total, parts, places, timeout=VAIN)
                for places in (everybody, [(last[0], 0)])
            ]
        # This one is asked for while the others are under way.
        background = Background(0, lambda: total(parts, everybody[-1:]))
    same_bits(background.result(), expected(group, [size - 1]))
    if rank == 0:
        assert {type(error) for error in late} == {WaitTimeoutError}
        # The node that is missing, not those whose sums have arrived.
        end = f" s for the sum of {named(last[0])}"
        assert all(str(error).endswith(end) for error in late)
    for taker, ranks in [(0, [last[0]]), (-1, range(size)), (0, [0])]:
        found = at(taker, total, parts, [(other, 0) for other in ranks])
        same_bits(found, expected(group, ranks))


def test_memory_is_freed_after_a_sum_that_was_given_up(held, group, rank, size):
    parts = NodeParts(group, COUNT * 8, "test")
    fill(parts, rank)
    with held:
        if rank == 0:
            with pytest.raises(WaitTimeoutError):
                total(parts, [(other, 0) for other in range(size)], timeout=VAIN)
    parts.free()
    # What it took is reused.
    again = NodeParts(group, COUNT * 8, "test")
    fill(again, rank, seed=1)
    found = at(-1, total, again, [(other, 0) for other in range(size)])
    same_bits(found, expected(group, range(size), seed=1))
    meet()
    again.free()


def test_the_agent_of_the_own_node_is_named_if_it_does_nothing(
    make, held, group, rank, size, monkeypatch
):
    parts, last = make(), group.nodes[-1]
    fill(parts, rank)
    with held:
        # After it was given up, the sum must not be begun: a later one may be read.
        monkeypatch.setattr(parts, "collecting", None)
        if rank == last[-1]:
            error = raised(total, parts, [(0, 0)], timeout=VAIN)
    if rank == last[-1]:
        assert str(error).endswith(f" s for the sum of {named(last[0])}")
    everywhere(until, lambda: parts._agent._is_idle(parts._number))
    monkeypatch.undo()
    meet()  # before another rank asks this one's agent
    same_bits(at(-1, total, parts, [(0, 0)]), expected(group, [0]))


def test_a_leader_asks_nobody_for_what_it_has(make, held, group, rank, size, pieces):
    parts, last = make(), group.nodes[-1]
    fill(parts, rank)
    others = {*range(size)} - {*last}
    if rank == last[0]:
        for each in others:
            parts.keep((each, 0), values(each).tobytes())
    with held:  # its agent
        if rank == last[0]:
            places = [(each, 0) for each in range(size)]
            found = parts.sum(places, COUNT, F8, 2, Deadline(WAIT, "test"), others)
            same_bits(found, expected(group, range(size), divisor=2))


def test_views_outlive_the_parts(group, rank):
    parts = NodeParts(group, 80, "test")
    view = parts.view((rank, 0), 10, F8)
    fill(parts, rank, count=10)
    parts.free()

    same_bits(view, values(rank, 10))
    view[:] = 3
    assert (view == 3).all()


def test_only_nodes_of_takers_have_memory_for_a_result(make, group, rank, size):
    parts = make(takers=[size - 1])
    fill(parts, rank)
    mine = group.node_ranks
    part, takes = parts._parts[rank].size, size - 1 in mine
    assert parts._result.size == takes * part
    assert parts.nbytes_here == part * (1 + (takes and rank == mine[0]))
    found = at(-1, total, parts, [(other, 0) for other in range(size)])
    same_bits(found, expected(group, range(size)))


def test_sum_that_a_signal_handler_ends_does_not_disturb_the_next(
    make, group, rank, size
):
    parts = make()
    fill(parts, rank)
    places = [(other, 0) for other in range(size)]

    def trial(number):
        more = interrupt(lambda: total(parts, places), number)
        same_bits(total(parts, places[:1]), expected(group, [0]))
        return more, None

    at(-1, at_each_point, trial, 5)
    same_bits(at(0, total, parts, places), expected(group, range(size)))
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
