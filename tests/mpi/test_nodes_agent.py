"""Agents of nodes: what they are asked to do, and how they begin and end."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpcaccum import Group, InvalidArgumentError, WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.mpi import MPI, AtomicWords
from hpcaccum.nodes import Agent, NodeParts
from hpcaccum.wake import Wake

from .acting import VAIN, at, until
from .interrupting import at_each_point, interrupt
from .on_nodes import group_on_nodes, held_agent, leads, named  # noqa: F401
from .support import WAIT, meet
from .training import raised


class Notes:
    """A service that notes its requests; each takes as many steps as it says."""

    def __init__(self, may_end=None):
        self.begun, self.done, self._may_end = [], [], may_end

    def handle(self, source, steps, *words):
        self.begun.append((source, *words))
        for _ in range(steps):
            yield True
        while self._may_end is not None and not self._may_end.is_set():
            yield False
        self.done.append((source, *words))


class Relay:
    """A service that passes requests on to the next node, and takes its time."""

    def __init__(self, agent):
        self.agent, self.number, self.done = agent, None, []

    def handle(self, source, left):
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            yield False
        if left:
            nodes = len(self.agent.leaders)
            following = (self.agent.node + 1) % nodes
            self.agent.request(following, self.number, left - 1)
        while time.monotonic() < end + 0.02:
            yield False
        self.done.append(source)


@pytest.fixture
def added(group):
    """Return a function that adds services; all are removed at the end."""
    agent, numbers = Agent.of(group), []

    def add(service):
        numbers.append(agent.add(service))
        meet()
        return agent, numbers[-1]

    yield add
    for number in numbers:
        agent.remove(number, "test")


def test_there_is_one_agent_on_each_node(group, rank, added):
    agent, _ = added(Notes())

    assert Agent.of(group) is agent
    assert agent.leaders == [node[0] for node in group.nodes]
    assert rank in group.nodes[agent.node]
    assert agent.is_leader == (rank == agent.leaders[agent.node])


def test_agents_are_threads_of_leaders_while_there_are_services(group):
    before = threading.active_count()
    agent = Agent.of(group)
    numbers = [agent.add(Notes()) for _ in range(2)]
    during = threading.active_count()
    agent.remove(numbers[1], "test")
    less = threading.active_count()
    agent.remove(numbers[0], "test")

    assert (during, less) == (before + agent.is_leader,) * 2
    assert threading.active_count() == before
    assert "agent" not in group.named


def test_an_agent_replaces_the_thread_for_windows(group, rank):
    root = group.size - 1
    words = AtomicWords(group, root, 1)
    alone = threading.active_count()
    agent = Agent.of(group)
    number = agent.add(Notes())
    replaced = rank == root and agent.is_leader
    during = threading.active_count()
    meet()
    # Nobody but the agent, or the thread of another root, calls MPI there.
    changed = True if rank == root else words.fetch_add(0, 1) < group.size
    if rank == root:
        changed = until(lambda: words._words[0] == group.size - 1)
    agent.remove(number, "test")
    after = threading.active_count()
    words.free()

    assert during == alone + agent.is_leader - replaced
    assert after == alone
    assert changed


def test_requests_of_all_ranks_reach_the_agents_of_all_nodes(added, rank, size):
    notes = Notes()
    agent, number = added(notes)
    for turn in range(5):
        for node in range(len(agent.leaders)):
            agent.request(node, number, turn, node, turn)
    if agent.is_leader:
        until(lambda: len(notes.done) == 5 * size)
        for source in range(size):
            # One rank's requests arrive in the order in which it has sent them.
            mine = [words for each, *words in notes.begun if each == source]
            assert mine == [[agent.node, turn] for turn in range(5)]
    else:
        assert notes.begun == []
    meet()


def test_a_request_that_waits_does_not_delay_others(added, rank, size):
    may_end = threading.Event()
    slow, quick = Notes(may_end), Notes()
    agent, first = added(slow)
    _, second = added(quick)
    for node in range(len(agent.leaders)):
        agent.request(node, first, 0)
        agent.request(node, second, 3)
    if agent.is_leader:
        until(lambda: len(quick.done) == size)
        until(lambda: len(slow.begun) == size)
        assert slow.done == []
    meet()
    may_end.set()
    if agent.is_leader:
        until(lambda: len(slow.done) == size)
    meet()


@pytest.mark.parametrize("steps", [0, 1, 400])
def test_a_service_is_removed_when_its_requests_are_done(group, rank, size, steps):
    agent, notes, other = Agent.of(group), Notes(), Notes()
    kept, number = agent.add(other), agent.add(notes)
    meet()
    for node in range(len(agent.leaders)):
        agent.request(node, number, steps, "last")
    agent.remove(number, "test")
    if agent.is_leader:
        assert sorted(notes.done) == [(source, "last") for source in range(size)]
    agent.remove(kept, "test")


@pytest.fixture
def threads_take_turns():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_service_is_removed_while_its_agent_receives_requests(
    group, threads_take_turns
):
    agent = Agent.of(group)
    kept = agent.add(Notes())
    for _ in range(30):
        notes = Notes()
        number = agent.add(notes)
        for _ in range(200):
            agent.request(agent.node, number, 0)
        agent.remove(number, "test")
        mates = len(group.nodes[agent.node])
        assert len(notes.done) == 200 * mates * agent.is_leader
    agent.remove(kept, "test")


def test_a_service_is_removed_after_requests_of_agents_for_it(group, rank):
    # Each one is sent while another one is carried out.
    agent = Agent.of(group)
    for passed in [0, 1, 2, 3, 4]:
        relay, nodes = Relay(agent), len(agent.leaders)
        relay.number = agent.add(relay)
        meet()
        agent.request(0, relay.number, passed)
        agent.remove(relay.number, "test")
        visits = [n % nodes for n in range(passed + 1)].count(agent.node)
        assert len(relay.done) == group.size * visits * agent.is_leader
        agent = Agent.of(group)
    agent.remove(agent.add(Notes()), "test")


def test_a_request_may_come_before_its_service(added, group, size):
    agent, _ = added(Notes())
    notes, late = Notes(), group.rank == agent.leaders[-1]
    number = None if late else agent.add(notes)
    numbers = meet(number)
    if group.rank == 0:
        for turn in range(3):
            agent.request(len(agent.leaders) - 1, numbers[0], 0, turn)
        until(lambda: not agent._unreceived())
    meet()
    if late:
        number = agent.add(notes)
        until(lambda: len(notes.done) == 3)
    meet()
    agent.remove(number, "test")

    assert notes.done == [(0, turn) for turn in range(3)] * late


def test_a_request_may_come_before_the_last_service_is_removed(
    added, group, monkeypatch
):
    agent, _ = added(Notes())
    old, new, late = Notes(), Notes(), group.rank == agent.leaders[-1]
    number, exchange, rounds = agent.add(old), group.raise_together, []
    meet()

    def slow(*args):
        found = exchange(*args)
        rounds.append(None)
        if len(rounds) == 2:
            until(agent._running.__len__)
        return found

    if late:
        monkeypatch.setattr(group, "raise_together", slow)
    agent.remove(number, "test")
    number = agent.add(new)
    if group.rank == 0:
        agent.request(len(agent.leaders) - 1, number, 0)
    if late:
        until(lambda: new.done)
    meet()
    agent.remove(number, "test")

    assert (old.done, new.done) == ([], [(0,)] * late)


def test_numbers_of_services_are_reused_with_their_tags(group):
    agent = Agent.of(group)
    numbers = [agent.add(Notes()) for _ in range(3)]
    assert numbers == [0, 1, 2]
    assert len({agent.tag(number) for number in numbers}) == 3
    for _ in range(3):
        agent.remove(1, "test")
        # Another rank may not have removed it yet.
        assert agent.add(Notes()) == 3
        agent.remove(3, "test")
        assert agent.add(Notes()) == 1
    for number in numbers:
        agent.remove(number, "test")


def test_parts_are_made_and_freed_many_times(group, rank, size):
    # MPICH has 2,048 communicators; each new agent takes one.
    made = []
    for turn in range(8):
        parts = NodeParts(group, 8, "test")
        parts.view((rank, 0), 1, np.dtype("f8"))[:] = turn
        made.append(communicators(group))
        parts.free()
    assert max(made) - min(made) <= 1


def communicators(group):
    """Return the number of a new communicator, which grows with those in use."""
    comm = group.comm.Dup()
    number = comm.py2f()
    comm.Free()
    return number


def test_agent_that_does_not_answer_is_reported(group, rank, monkeypatch):
    may_end = threading.Event()
    agent = Agent.of(group)
    number = agent.add(Notes(may_end))
    meet()
    agent.request(0, number, 0)
    if rank == agent.leaders[0]:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
    error = raised(agent.remove, number, "test: free")
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    if rank == agent.leaders[0]:
        assert type(error) is WaitTimeoutError
        assert f"s for the agent of {named(rank)} to end" in str(error)
    else:
        assert str(error).startswith(f"test: free: rank {agent.leaders[0]}: ")
    # All ranks can try again.
    meet()
    may_end.set()
    agent.remove(number, "test: free")


def test_agent_that_does_not_receive_a_request_is_named(held, group, rank, monkeypatch):
    agent, notes = Agent.of(group), Notes()
    number, leader = agent.add(notes), group.nodes[-1][0]
    with held:
        if rank == 0:
            agent.request(agent.node, number, 0)
            until(lambda: notes.done)
            agent.request(len(agent.leaders) - 1, number, 0)
            monkeypatch.setenv("HPCACCUM_TIMEOUT", str(VAIN))
        error = raised(agent.remove, number, "test: free")
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    agent.remove(number, "test: free")
    assert str(error).endswith(f" s for the agents of {named(leader)}")
    assert type(error) is (RuntimeError if rank else WaitTimeoutError)
    assert len(notes.done) == (rank == 0) + (rank == leader)


def test_few_nodes_are_named_in_a_message(added, group, monkeypatch):
    agent, _ = added(Notes())
    leaders = list(range(0, 40, 4))
    monkeypatch.setattr(agent, "leaders", leaders)
    monkeypatch.setattr(agent, "hosts", [f"h{leader}" for leader in leaders])

    assert agent.describe([2]) == "node h8 (leader rank 8)"
    two = "nodes h0 (leader rank 0), h12 (leader rank 12)"
    assert agent.describe([3, 0]) == two
    assert agent.describe(range(10)).endswith(", h28 (leader rank 28), 2 more")


def test_without_threads_every_rank_gets_an_error(group, rank, size, monkeypatch):
    # One of the processes is enough.
    if rank == group.nodes[-1][0]:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    for _ in range(2):
        error = raised(NodeParts, group, 80, "test")
        assert type(error) is InvalidArgumentError
        assert "MPI provides no MPI_THREAD_MULTIPLE" in str(error)
        if rank != group.nodes[-1][0]:
            assert f"rank {group.nodes[-1][0]}: " in str(error)
    assert "agent" not in group.named
    meet()


def test_ranks_that_are_not_leaders_need_no_threads(group, rank, monkeypatch):
    if rank not in [ranks[0] for ranks in group.nodes]:
        monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    NodeParts(group, 80, "test").free()


def test_request_that_a_signal_handler_ends_is_made_or_not(added, rank):
    notes, asked = Notes(), iter(range(10**6))
    agent, number = added(notes)

    def trial(point):
        turn = next(asked)
        more = interrupt(lambda: agent.request(0, number, 0, turn), point)
        # It disturbs no later one.
        agent.request(0, number, 0, turn, "next")
        return more, None

    at(-1, at_each_point, trial)
    count = at(-1, next, asked)
    if agent.leaders[0] == rank:
        until(
            lambda: (
                len(notes.done) >= count and notes.done[-1][1:] == (count - 1, "next")
            )
        )
        turns = [words[1] for words in notes.done if words[-1] == "next"]
        assert turns == list(range(count))
        single = [words[1] for words in notes.done if words[-1] != "next"]
        assert single == sorted(set(single))
    meet()


def test_a_signal_handler_may_send_a_request_during_another(added, rank):
    notes, asked = Notes(), iter(range(10**6))
    agent, number = added(notes)

    def trial(point):
        turn = next(asked)

        def send(*words):
            agent.request(0, number, 0, turn, *words)

        return interrupt(send, point, lambda: send("handler")), None

    at(-1, at_each_point, trial)
    count = at(-1, next, asked)
    if agent.leaders[0] == rank:
        # The last call has no such point.
        until(lambda: len(notes.done) == 2 * count - 1)
        assert len({words[1:] for words in notes.done}) == 2 * count - 1
    meet()


def test_ranks_of_one_node_have_no_agent(comm):
    group, before = Group.of(comm), threading.active_count()
    if not group.single_node:
        pytest.skip("the ranks are on several nodes")
    NodeParts(group, 80, "test").free()

    assert "agent" not in group.named
    assert threading.active_count() == before


# What threads of its rank wait for


def test_the_agent_looks_for_a_thread_that_waits(group, added):
    agent, number = added(Notes())
    looks, true = Counter(), threading.Event()

    def fact():
        looks[threading.current_thread()] += 1
        return true.is_set()

    if leads(group):
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(
                agent.wait, number, fact, Deadline(WAIT, "test"), lambda: "a fact"
            )
            until(lambda: looks[agent._thread] > 3)
            true.set()
            waits.result(WAIT)
        del looks[agent._thread]
        # At the beginning, twice after a nap of no time, and when it was woken.
        assert sum(looks.values()) <= 4
        assert agent._facts == []


def test_a_fact_that_does_not_come_is_named(group, added):
    agent, number = added(Notes())
    if leads(group):
        with pytest.raises(WaitTimeoutError, match=r"^test: waited .* s for a fact$"):
            agent.wait(number, lambda: False, Deadline(VAIN, "test"), lambda: "a fact")
        assert agent._facts == []


def test_an_interrupted_wait_for_a_fact_leaves_nothing(group, added):
    agent, number = added(Notes())
    if leads(group):

        def interrupted():
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            agent.wait(number, interrupted, Deadline(WAIT, "test"), lambda: "a fact")
        assert agent._facts == []


def test_a_signal_handler_waits_during_another_wait(group, added):
    agent, number = added(Notes())
    seen = []

    def wait():
        deadline = Deadline(0.01, "test")
        seen.append(
            str(raised(agent.wait, number, lambda: False, deadline, lambda: "a fact"))
        )

    def trial(point):
        seen.clear()
        more = interrupt(wait, point, act=wait)
        assert agent._facts == []
        return more, len(seen)

    if leads(group):
        assert at_each_point(trial) == {1, 2}


def test_facts_of_a_service_are_forgotten_with_it(group, added):
    agent, kept = added(Notes())
    number = agent.add(Notes())
    meet()
    if leads(group):
        agent._facts += [(n, lambda: False, Wake()) for n in (number, kept)]
    agent.remove(number, "test")
    if leads(group):
        assert [n for n, _, _ in agent._facts] == [kept]
        agent._facts.clear()


# How often it looks


def test_an_agent_that_is_woken_looks_often_again(group, added, monkeypatch):
    agent, _ = added(Notes())
    idle = [0.0]
    monkeypatch.setattr(
        group.progress, "nap", lambda seconds: idle.append(seconds) or 0.002
    )
    if leads(group):
        until(lambda: idle[-1] > 0.1)
        agent.wake()
        until(lambda: idle[-1] < 0.05)
