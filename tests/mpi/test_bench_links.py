"""Bytes on the links of nodes: each rank stands for a node with a counter."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import Group, group_of
from hpcaccum.bench import links
from hpcaccum.bench.links import Links
from hpcaccum.bench.measure import RingExchange, WrongAnswerError
from hpcaccum.bench.wire import FLOOR, IN, LINK, OTHER_IN, OTHER_OUT, OUT, TIME, Wire

pytestmark = pytest.mark.any_size


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
def apart(monkeypatch, rank):
    """Every rank has a network interface of its own."""
    monkeypatch.setattr(links, "network", lambda: f"network of {rank}")


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
@pytest.mark.usefixtures("apart")
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
def test_nodes_of_one_host_are_named(group, size):
    reason = Links(group, Counters("eth0")).obstacle

    assert reason.startswith("the nodes of ranks 0-1 are one host, ")
    assert "none of its interfaces" in reason


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("apart")
def test_a_node_without_interfaces_is_named(group, rank, size):
    reason = Links(group, Counters(*["eth0"][rank == size - 1 :])).obstacle

    assert "no interface but loopback" in reason


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_counters_that_do_not_count_what_is_sent_are_not_used(
    group, rank, size, factor, counted
):
    counters = Counters("eth0")
    counted(counters, factor if rank == size - 1 else 1.0)
    reason = Links(group, counters).obstacle

    shown = f"{min(factor, 1):.2f} to {max(factor, 1):.2f} times"
    assert f"changed the counters by {shown} its bytes" in reason
    assert max(map(len, reason.splitlines())) <= 80


@pytest.mark.parametrize("nbytes", [128, 4096])
@pytest.mark.parametrize("shape", [[1, 1], [2, 1], [2, 2], [1, 2, 1]])
def test_an_exchange_brings_the_vector_of_the_node_before(
    shape, nbytes, group, rank, size
):
    if sum(shape) != size:
        pytest.skip("another number of ranks")
    ends = np.cumsum(shape)
    group.nodes = [list(range(b - k, b)) for b, k in zip(ends, shape, strict=True)]
    group.node_number = next(n for n, ranks in enumerate(group.nodes) if rank in ranks)
    exchange = RingExchange(group, nbytes)
    if exchange.got.size:
        exchange.got[:] = -1
        with pytest.raises(WrongAnswerError):
            exchange.check()
    exchange()
    exchange.check()
    into = group.allgather((group.node_number, exchange.got.nbytes), "test")
    exchange.free()

    for node in range(len(shape)):
        assert sum(received for number, received in into if number == node) == nbytes


class Fixed:
    """Links that always carry the same bytes: those of three nodes, out and in."""

    obstacle = None

    def during(self, operation):
        return operation(), np.array([[9000, 8000], [100, 400], [300, 200]])


def figures(comm, group_links):
    case = Wire(group_of(comm), 1000 * 128, links=group_links)
    kind = case.kinds[0]
    kind.run(2)
    found = kind.figures({"cross-shard": 1.0})
    case.free()
    return found


def test_bytes_of_a_step_are_in_units_of_the_gradient(comm):
    found = figures(comm, Fixed())
    found = {name: 2 * 128 * bytes_ for name, bytes_ in found.items()}  # of two steps

    assert found[OUT] == pytest.approx(9)
    assert found[IN] == pytest.approx(8)
    assert found[OTHER_OUT] == pytest.approx(0.3)
    assert found[OTHER_IN] == pytest.approx(0.4)
    assert found[LINK] == pytest.approx(9)


def test_without_links_there_are_times_and_floors_only(comm):
    found = figures(comm, None)

    assert set(found) == {FLOOR, TIME}
