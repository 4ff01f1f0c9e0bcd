"""Parameters: what other nodes than the root's fetch, and how often."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hpcaccum import WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.server import Parameters, node_copy

from .acting import VAIN, everywhere, until
from .on_nodes import group_on_nodes, held_agent, named  # noqa: F401
from .support import WAIT
from .training import meet, raised

SIZE = 100_000  # more than one piece


@pytest.fixture
def parameters(group):
    made = Parameters(group, 0, SIZE, np.float32, "test")
    yield made
    meet()
    made.free()


def publish(parameters, rank, step):
    if rank == 0:
        parameters.publish(lambda flat: flat.fill(step), step)


def get(parameters, step):
    """Wait for a step; return the newest one of this node, and its values."""
    out, deadline = np.zeros(SIZE, np.float32), Deadline(WAIT, "get")
    parameters.wait(step, deadline, str)
    found = parameters.read(lambda flat: np.copyto(out, flat), deadline)
    return found, set(out.tolist())


def test_each_node_gets_what_it_waits_for(parameters, rank):
    for step in (0, 1, 5):
        publish(parameters, rank, step)
        assert get(parameters, step) == (step, {float(step)})
        meet()


def test_a_node_gets_nothing_that_it_does_not_wait_for(parameters, group, rank):
    publish(parameters, rank, 0)
    get(parameters, 0)
    meet()
    publish(parameters, rank, 1)
    meet()

    elsewhere = 0 not in group.nodes[group.node_number]
    assert parameters.newest() == 1
    assert parameters.version() == (0 if elsewhere else 1)


def test_a_step_that_has_just_come_is_recent(parameters, rank, monkeypatch):
    publish(parameters, rank, 0)
    get(parameters, 0)
    meet()
    publish(parameters, rank, 1)
    meet()
    # Time stands still after the wait.
    parameters._came = 50.0
    monkeypatch.setattr(node_copy.time, "monotonic", lambda: 50.0009)
    soon = parameters.recent()
    monkeypatch.setattr(node_copy.time, "monotonic", lambda: 50.0011)
    later = parameters.recent()
    monkeypatch.undo()

    assert (soon, later) == (parameters.version(), 1)


def test_ranks_of_a_node_may_wait_for_different_steps(parameters, rank):
    publish(parameters, rank, 0)
    meet()
    # Step 9 never comes: that must not keep a step that is there from the node.
    late = raised(parameters.wait, 9, Deadline(0.01, "late"), str)
    found = get(parameters, 0)
    meet()
    publish(parameters, rank, 1)

    assert type(late) is WaitTimeoutError
    assert found == (0, {0.0})
    assert get(parameters, 1) == (1, {1.0})


def test_nothing_is_sent_twice_to_a_node(parameters, group, rank, monkeypatch):
    sent, send = [], parameters._send_snapshot

    def counted(leader, snapshot):
        sent.append((leader, snapshot.step))
        return send(leader, snapshot)

    monkeypatch.setattr(parameters, "_send_snapshot", counted)
    for step in range(3):
        publish(parameters, rank, step)
        meet()
        # All ranks of a node at once, and again.
        get(parameters, step)
        get(parameters, step)
        meet()

    others = [ranks[0] for ranks in group.nodes if 0 not in ranks]
    if rank == 0:
        assert sorted(sent) == sorted((r, step) for r in others for step in range(3))


def test_each_node_asks_for_a_step_once(parameters, group, rank, monkeypatch):
    asked, send = [], parameters._send

    def counted(leader, step):
        asked.append((leader, step))
        return send(leader, step)

    monkeypatch.setattr(parameters, "_send", counted)
    meet()
    for step in range(3):
        # All ranks of all nodes ask before there is anything to send.
        late = raised(parameters.wait, step, Deadline(VAIN, "early"), str)
        assert type(late) is WaitTimeoutError
        meet()
        publish(parameters, rank, step)
        assert get(parameters, step) == (step, {float(step)})
        meet()

    others = [ranks[0] for ranks in group.nodes if 0 not in ranks]
    if rank == 0:
        assert sorted(asked) == sorted((r, step) for r in others for step in range(3))


@pytest.mark.parametrize(
    ("asked", "published"), [((5, 9, 4), (5,)), ((4, 3, 9), (3, 5))]
)
def test_the_answer_that_a_step_never_comes_is_for_that_step(
    parameters, group, rank, monkeypatch, asked, published
):
    arrived, sent, released = [], [], threading.Event()
    handle, send = parameters._send, parameters._send_snapshot

    def counted(leader, step):
        arrived.append(step)
        return handle(leader, step)

    def slow(leader, snapshot):
        sent.append(snapshot.step)
        yield from send(leader, snapshot)
        while not released.is_set():
            yield False

    monkeypatch.setattr(parameters, "_send", counted)
    monkeypatch.setattr(parameters, "_send_snapshot", slow)
    meet()
    if rank == group.nodes[-1][0]:
        for step in asked:
            raised(parameters.wait, step, Deadline(VAIN, "in vain"), str)
    meet()
    if rank == 0:
        until(lambda: arrived == list(asked))
        for step in published:
            publish(parameters, rank, step)
            until(lambda: sent == [published[0]])
        # As `free` does, which the last one waits for.
        parameters._closing = True
        released.set()

    everywhere(until, lambda: parameters._agent._is_idle(parameters._number))

    if rank == 0:
        assert sorted(sent) == [~9, *published]


def test_nodes_that_are_waited_for_are_named(parameters, held, group, rank):
    first, last = group.nodes[0][0], group.nodes[-1][0]
    with held:
        early = raised(parameters.wait, 1, Deadline(VAIN, "early"), lambda: "an update")
        meet()
        publish(parameters, rank, 1)
        meet()
        here = rank not in group.nodes[-1]
        found = raised(get, parameters, 1) if here else None
        late = raised(parameters.wait, 1, Deadline(VAIN, "late"), lambda: "an update")
    assert str(early).endswith("s for an update")
    if not here:
        way = f"step 1, on its way from {named(first)} to {named(last)}"
        assert str(late).endswith(f" s for {way}")
    else:
        assert found == (1, {1.0})
    assert get(parameters, 1) == (1, {1.0})
