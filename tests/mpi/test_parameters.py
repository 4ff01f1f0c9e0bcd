"""Parameters: what other nodes than the root's fetch, and how often."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from hpcaccum import WaitTimeoutError
from hpcaccum.deadline import Deadline
from hpcaccum.nodes import is_short
from hpcaccum.server import Parameters, node_copy
from hpcaccum.server.node_copy import step_of, version_of

from .acting import VAIN, at, everywhere, until
from .interrupting import at_each_point, interrupt
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

    elsewhere = 0 not in group.node_ranks
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


@pytest.fixture
def sent(parameters, monkeypatch):
    """Return the nodes and steps that the root's agent sends."""
    found, send = [], parameters._send_snapshot

    def counted(node, snapshot):
        found.append((node, step_of(snapshot.version)))
        return send(node, snapshot)

    monkeypatch.setattr(parameters, "_send_snapshot", counted)
    return found


def test_nothing_is_sent_twice_to_a_node(parameters, sent, group, rank):
    for step in range(3):
        publish(parameters, rank, step)
        meet()
        # All ranks of a node at once, and again.
        get(parameters, step)
        get(parameters, step)
        meet()

    if rank == 0:
        assert sorted(sent) == for_each_node(group, range(3))


def test_each_node_asks_for_a_step_once(parameters, group, rank, monkeypatch):
    asked, send = [], parameters._do_send

    def counted(node, version):
        asked.append((node, step_of(version)))
        return send(node, version)

    monkeypatch.setattr(parameters, "_do_send", counted)
    meet()
    for step in range(3):
        # All ranks of all nodes ask before there is anything to send.
        late = raised(parameters.wait, step, Deadline(VAIN, "early"), str)
        assert type(late) is WaitTimeoutError
        meet()
        publish(parameters, rank, step)
        assert get(parameters, step) == (step, {float(step)})
        meet()

    if rank == 0:
        assert sorted(asked) == for_each_node(group, range(3))


@pytest.mark.parametrize(
    ("asked", "published"), [((5, 9, 4), (5,)), ((4, 3, 9), (3, 5))]
)
def test_nobody_waits_for_a_step_that_never_comes(
    parameters, group, rank, monkeypatch, asked, published
):
    arrived, sent, released = [], [], threading.Event()
    handle, send = parameters._do_send, parameters._send_snapshot

    def counted(node, version):
        arrived.append(step_of(version))
        return handle(node, version)

    def slow(node, snapshot):
        sent.append(step_of(snapshot.version))
        yield from send(node, snapshot)
        while not released.is_set():
            yield False

    monkeypatch.setattr(parameters, "_do_send", counted)
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
        assert sent == list(published)


def others(group):
    """Return the nodes without rank 0."""
    return [node for node, ranks in enumerate(group.nodes) if 0 not in ranks]


def for_each_node(group, steps):
    """Return all pairs of one of these nodes and a step."""
    return sorted((node, step) for node in others(group) for step in steps)


@pytest.fixture(params=[SIZE, 10], ids=["long", "short"])
def unasked(request, group, monkeypatch):
    """Make parameters for which no rank can ask."""
    made = Parameters(group, 0, request.param, np.float32, "test")
    monkeypatch.setattr(made, "_do_fetch", None)
    if is_short(made.copies.copy(0).nbytes):
        # Sent without the agent of the node of rank 0.
        monkeypatch.setattr(made, "_do_push", None)
    yield made
    meet()
    made.free()


def wait(parameters, step):
    """Wait for a step that comes unasked; return the values of this node."""
    deadline, found = Deadline(WAIT, "get"), []
    parameters.wait(step, deadline, str, comes=True)
    parameters.read(lambda flat: found.append(set(flat.tolist())), deadline)
    return found[-1]


def test_nodes_of_ranks_that_wait_need_not_ask(unasked, group, rank):
    for step in range(5):
        if rank == 0:
            unasked.publish(lambda flat: flat.fill(step), step, range(group.size))  # noqa: B023
        assert wait(unasked, step) == {step}
        meet()


def test_other_nodes_get_nothing_unasked(unasked, group, rank, size):
    far = others(group)[-1]
    for step in range(3):
        if rank == 0:
            waiting = group.nodes[far] if step % 2 else [0]
            unasked.publish(lambda flat: flat.fill(step), step, waiting)  # noqa: B023
        if step % 2 and group.node_number == far:
            assert wait(unasked, step) == {step}
        everywhere(until, lambda: unasked._agent._is_idle(unasked._number))
    newest = {0: 2, far: 1}.get(group.node_number, -1)
    assert unasked.version() == (2 if 0 in group.node_ranks else newest)


def test_a_node_that_has_asked_gets_a_step_once(parameters, sent, group, rank):
    for step in range(3):
        late = raised(parameters.wait, step, Deadline(VAIN, "early"), str)
        assert type(late) is WaitTimeoutError
        meet()
        if rank == 0:
            parameters.publish(
                lambda flat: flat.fill(step),  # noqa: B023
                step,
                range(group.size),
            )
        assert get(parameters, step) == (step, {float(step)})
        meet()
    if rank == 0:
        assert sorted(sent) == for_each_node(group, range(3))


def test_a_step_comes_unasked_also_after_an_interruption(unasked, group):
    far = others(group)[-1]
    steps = itertools.count()

    def trial(number):
        step = next(steps)

        def publish():
            unasked.publish(lambda flat: flat.fill(step), step, range(group.size))

        more = interrupt(publish, number)
        there = unasked.version() == step
        if not there:
            publish()
        until(lambda: unasked._sent.get(far) == version_of(step))
        return more, there

    assert at(0, at_each_point, trial, 5) == {False, True}
    newest = at(0, unasked.version)
    assert wait(unasked, newest) == {newest}


def test_two_steps_that_have_arrived_do_not_mix(parameters, group, rank, monkeypatch):
    def receive(message):
        yield False
        message.view("f4")[:] = 1

    def take_both():
        monkeypatch.setattr(parameters, "_receive", receive)
        nbytes = parameters.copies.size * 4
        first = parameters._do_take(version_of(1), nbytes, None)
        contents = np.full(nbytes // 4, 2, "f4").tobytes()
        second = parameters._do_take(version_of(2), nbytes, contents)
        found = []
        assert (next(first), next(second)) == (False, False)
        for steps in (first, second):
            assert list(steps) == []
            found.append(get(parameters, len(found) + 1))
        return found

    leader = group.nodes[others(group)[0]][0]
    assert at(leader, take_both) == [(1, {1.0}), (2, {2.0})]


def test_a_step_that_was_sent_again_is_ignored(parameters, group, rank):
    def take(step):
        contents = np.full(parameters.copies.size, step, "f4").tobytes()
        version = version_of(step)
        assert list(parameters._do_take(version, len(contents), contents)) == []
        return get(parameters, 0)

    leader = group.nodes[others(group)[0]][0]
    assert at(leader, lambda: [take(step) for step in (2, 2, 1, 3)]) == [
        (2, {2.0}),
        (2, {2.0}),
        (2, {2.0}),
        (3, {3.0}),
    ]


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
