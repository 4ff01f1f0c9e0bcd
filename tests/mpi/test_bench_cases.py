"""The benchmarks compute what they should, and notice if not."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import ConditionalAccumulator, Reducer, SyncReplicasOptimizer, group_of
from hpcaccum.bench.measure import Memory, RingExchange, measure, rows
from hpcaccum.bench.options import BENCHMARKS, CASES, WIRE
from hpcaccum.server.publisher import Publisher

pytestmark = pytest.mark.any_size

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

    names = [row.name for row in found]
    assert len(set(names)) == len(names)
    for row in found:
        last = row.max_us if row.p99_us is None else row.p99_us
        assert 0 < row.min_us <= row.median_us <= last <= row.max_us
        # Of three times all quartiles may be among the ends; the differences of seconds
        # and those of microseconds are then rounded otherwise.
        assert 0 <= row.spread_us <= 1.000001 * (row.max_us - row.min_us)
        assert row.samples >= 3
        assert row.raw is None or row.raw in names
    assert any(row.reference for row in found)
    assert not all(row.reference for row in found)


def off(array):
    array = np.array(array)
    array.flat[-1] += 1000
    return array


def wrong_reduce(monkeypatch):
    reduce = Reducer.reduce

    def wrong(self, *args, **kwargs):
        result = reduce(self, *args, **kwargs)
        for array in (kwargs.get("out") or {}).values():
            array.flat[-1] += 1
        return {name: off(array) for name, array in result.items()}

    monkeypatch.setattr(Reducer, "reduce", wrong)


def wrong_take(monkeypatch):
    take = ConditionalAccumulator.take_grad

    def wrong(self, *args, **kwargs):
        return off(take(self, *args, **kwargs))

    monkeypatch.setattr(ConditionalAccumulator, "take_grad", wrong)


def wrong_read(monkeypatch):
    read = Publisher.read

    def wrong(self, use, deadline):
        return read(self, lambda flat: use(off(flat)), deadline)

    monkeypatch.setattr(Publisher, "read", wrong)


def wrong_gradient(monkeypatch):
    apply = SyncReplicasOptimizer.apply_gradients

    def wrong(self, pairs, *args):
        (grad, var), *rest = pairs
        return apply(self, [(off(grad), var), *rest], *args)

    monkeypatch.setattr(SyncReplicasOptimizer, "apply_gradients", wrong)


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
    if rank in (0, size - 1):
        plant(monkeypatch)
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


@pytest.mark.parametrize("name", [*BENCHMARKS, WIRE])
def test_the_floor_is_that_of_memory_or_of_links(name, comm):
    case = make(name, comm)
    floors = {kind.name: kind.floor[0] for kind in case.kinds if kind.floor}
    case.free()

    if name != WIRE:
        assert floors.pop("copy") == "copy"
    memory = group_of(comm).single_node and name != WIRE
    assert set(floors.values()) == {"copy" if memory else "exchange"}


def test_what_does_not_fit_is_an_error_on_every_rank(comm, size):
    group = group_of(comm)

    assert Memory(shared=1, private=1).missing(group, SIZE) is None
    for memory in Memory(shared=1), Memory(shared=0, shared_first=1):
        reason = memory.missing(group, 1 << 50)
        assert "GiB of /dev/shm on" in reason
        assert set(comm.allgather(reason)) == {reason}
    assert "GiB of memory on" in Memory(shared=0, private=1).missing(group, 1 << 50)
