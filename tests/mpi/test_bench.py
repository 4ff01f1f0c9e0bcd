"""``hpcaccum bench``: measuring, its cases, and bytes on the links of nodes."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcaccum import (
    ConditionalAccumulator,
    Group,
    Reducer,
    SyncReplicasOptimizer,
    group_of,
)
from hpcaccum.bench.links import Links
from hpcaccum.bench.measure import Kind, Memory, RingExchange, apart, measure, rows
from hpcaccum.bench.options import BENCHMARKS, CASES, WIRE
from hpcaccum.server.double_buffer import DoubleBuffer

from ..unit.measured import check_rows

pytestmark = pytest.mark.any_size


def constant(name, seconds, **more):
    return Kind(name, lambda inner: [seconds], **more)


def samples(comm, *kinds, seconds=0.01, forget=lambda: None):
    case = SimpleNamespace(group=group_of(comm), kinds=kinds, forget=forget)
    return measure(case, "bench", seconds)


def test_turns_are_taken_until_the_time_of_rank_0_is_over(
    comm, rank, size, monkeypatch
):
    # A call takes 1 s on rank 0, none on the others.
    calls = []

    def run(inner):
        calls.append(inner)
        return [1.0]

    now = (lambda: float(len(calls))) if rank == 0 else (lambda: 0.0)
    monkeypatch.setattr("time.perf_counter", now)
    found = samples(comm, Kind("x", run), seconds=50.0)["x"]

    assert len(calls) == 2 + 50
    assert len(found) == 25 * size  # each after one that warms up


def test_kinds_take_turns_in_changing_order(comm):
    names = []

    def kind(name):
        def run(inner):
            names.append(name)
            return [1.0]

        return Kind(name, run)

    samples(comm, kind("a"), kind("b"), seconds=1e-9)

    # Verified and tried, then three rounds, each time with one to warm up.
    assert "".join(names) == "aabb" + "bbaa" + "aabb" + "bbaa"


def test_apart_leaves_out_what_surrounds():
    clock = SimpleNamespace(now=0.0)

    def passes(seconds):
        def operation():
            clock.now += seconds

        return operation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: clock.now)
        seconds = apart(passes(100.0), passes(1.0), passes(10.0))(4)

    assert seconds == [1.0]


def test_rows():
    kinds = [
        constant("ours", 0, raw="raw", floor=("copy", 2.0), bus=1.5),
        constant("raw", 0, reference=True),
        constant("copy", 0, reference=True, floor=("copy", 1.0)),
        constant("late", 0, bus=0, figures=lambda m: {"twice": 2 * m["late"]}),
    ]
    case = SimpleNamespace(nbytes=8, kinds=kinds)
    medians = {"ours": 4e-6, "raw": 6e-6, "copy": 1e-6, "late": 3.0}
    found = {name: [t / 2, t, 3 * t] for name, t in medians.items()}
    ours, raw, copy, late = rows("x", case, found)

    assert (ours.benchmark, ours.name, ours.bytes, ours.samples) == ("x", "ours", 8, 3)
    times = [ours.min_us, ours.median_us, ours.max_us, ours.spread_us]
    assert times == pytest.approx([2, 4, 12, 5])
    assert ours.algbw == pytest.approx(0.002)
    assert ours.busbw == pytest.approx(0.003)
    assert ours.vs_mpi == pytest.approx(1.5)
    assert ours.floor_us == pytest.approx(2.0)
    assert ours.vs_floor == pytest.approx(2.0)
    assert not ours.reference
    assert (raw.vs_mpi, raw.vs_floor, raw.floor_us) == (None, None, None)
    assert raw.reference
    assert copy.vs_floor == pytest.approx(1.0)
    assert (late.algbw, late.busbw, late.figures) == (None, None, {"twice": 6.0})
    case.kinds = [constant("many", 0)]
    [many] = rows("x", case, {"many": [*range(101)]})
    assert (many.p99_us, many.spread_us) == pytest.approx((99e6, 50e6))


# The cases compute what they should, and notice if not


SIZE = 4096
SECONDS = 0.01


def make(name, comm, nbytes=SIZE):
    return CASES[name](group_of(comm), nbytes)


@pytest.mark.parametrize("nbytes", [128, 1 << 17])
@pytest.mark.parametrize("name", [*BENCHMARKS, WIRE])
def test_every_kind_is_verified_and_timed(name, nbytes, comm, size):
    case = make(name, comm, nbytes)
    found = rows(name, case, measure(case, name, SECONDS))
    case.free()

    check_rows(found)


def off(array):
    array = np.array(array)
    array.flat[-1] += 1000
    return array


def wrong_reduce(reduce, self, *args, **kwargs):
    result = reduce(self, *args, **kwargs)
    for array in (kwargs.get("out") or {}).values():
        array.flat[-1] += 1
    return {name: off(array) for name, array in result.items()}


def wrong_take(take, self, *args, **kwargs):
    return off(take(self, *args, **kwargs))


def wrong_read(read, self, use, deadline):
    return read(self, lambda flat: use(off(flat)), deadline)


def wrong_gradient(apply, self, pairs, *args):
    (grad, var), *rest = pairs
    return apply(self, [(off(grad), var), *rest], *args)


REPLACED = {
    wrong_reduce: (Reducer, "reduce"),
    wrong_take: (ConditionalAccumulator, "take_grad"),
    wrong_read: (DoubleBuffer, "read"),
    wrong_gradient: (SyncReplicasOptimizer, "apply_gradients"),
}


@pytest.mark.parametrize(
    ("name", "kind", "plant"),
    [
        ("accumulate", "round", wrong_take),
        ("accumulate", "apply", wrong_take),
        ("accumulate", "writers", wrong_take),
        ("allreduce", "zero-copy", wrong_reduce),
        ("allreduce", "copying", wrong_reduce),
        ("allreduce", "32 arrays", wrong_reduce),
        ("allreduce", "flat", wrong_reduce),
        ("step", "step", wrong_reduce),
        ("step", "drop-stale", wrong_read),
        ("step", "reducer", wrong_reduce),
        (WIRE, "cross-shard", wrong_reduce),
        (WIRE, "sync-replicas", wrong_gradient),
        (WIRE, "sync-replicas", wrong_read),
        (WIRE, "drop-stale", wrong_read),
    ],
)
def test_a_planted_fault_is_found_before_anything_is_timed(
    name, kind, plant, comm, rank, size, monkeypatch
):
    case = make(name, comm)
    case.kinds = [each for each in case.kinds if each.name == kind]
    owner, method = REPLACED[plant]
    right = getattr(owner, method)
    if rank in (0, size - 1):
        monkeypatch.setattr(owner, method, lambda *a, **kw: plant(right, *a, **kw))
    with pytest.raises(RuntimeError, match=f"bench, {kind}: .*(wrong|off by)"):
        measure(case, "bench", SECONDS)
    case.free()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("name", [*BENCHMARKS, WIRE])
def test_between_nodes_the_exchange_is_verified(name, comm, rank, size, monkeypatch):
    case = make(name, comm)
    exchanges = [kind for kind in case.kinds if kind.name == "exchange"]
    assert exchanges or group_of(comm).single_node
    call = RingExchange.__call__

    def wrong(self):
        call(self)
        self.got[-1:] += 1

    if rank == size - 1:
        monkeypatch.setattr(RingExchange, "__call__", wrong)
    case.kinds = exchanges
    if exchanges:
        pattern = r"exchange: (rank \d: )?1 of .* elements are wrong"
        with pytest.raises(RuntimeError, match=pattern):
            measure(case, "bench", SECONDS)
    case.free()


def test_what_does_not_fit_is_an_error_on_every_rank(comm, size):
    group = group_of(comm)

    assert Memory(shared=1, private=1).missing(group, SIZE) is None
    for memory in Memory(shared=1), Memory(shared=0, shared_first=1):
        reason = memory.missing(group, 1 << 50)
        assert "GiB of /dev/shm on" in reason
        assert set(comm.allgather(reason)) == {reason}
    assert "GiB of memory on" in Memory(shared=0, private=1).missing(group, 1 << 50)


# Bytes on links: each rank stands for a node with a counter


class Counters:
    """Interfaces that count what is sent, and something at each look."""

    def __init__(self, *names, chatter=0):
        self.names = list(names)
        self.sent = self.received = 10**12
        self._chatter = chatter

    def read(self):
        self.sent += self._chatter
        self.received += 2 * self._chatter
        return self.sent, self.received


@pytest.fixture
def group(comm, size, rank):
    """A group whose ranks are nodes of their own, for benchmarks."""
    group = Group(comm.Dup())
    group.nodes, group.node_number = [[each] for each in range(size)], rank
    yield group
    group.free()


@pytest.fixture
def counted(monkeypatch):
    """Let counters count the bytes of exchanges, times a factor."""

    def count(counters, factor=1.0):
        call = RingExchange.__call__

        def exchange(self):
            call(self)
            counters.sent += int(factor * self.mine.nbytes)
            counters.received += int(factor * self.got.nbytes)

        monkeypatch.setattr(RingExchange, "__call__", exchange)

    return count


@pytest.mark.ranks(min=2)
def test_bytes_are_those_of_the_operation_without_the_counting(group, rank, counted):
    counters = Counters("eth0", chatter=100)
    counted(counters)
    found = Links(group, counters)

    def operation():
        counters.sent += 1000 * (rank + 1)
        counters.received += 7
        return rank

    result, sent = found.during(operation)

    assert found.obstacle is None
    assert result == rank
    assert sent.tolist() == [[1000 * (each + 1), 7] for each in range(group.size)]
    assert f"eth0 of each of {group.size} nodes" in found.about


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_counters_that_do_not_count_what_is_sent_are_not_used(
    group, rank, size, factor, counted
):
    counters = Counters("eth0")
    counted(counters, factor if rank == size - 1 else 1.0)
    found = Links(group, counters)

    shown = f"{min(factor, 1):.2f} to {max(factor, 1):.2f} times"
    assert f"changed the counters by {shown} its bytes" in found.obstacle
    first, *reason = found.about.splitlines()
    assert first == f"no bytes counted by eth0 of each of {size} nodes:"
    assert reason == found.obstacle.splitlines()
    assert max(map(len, reason)) <= 80
