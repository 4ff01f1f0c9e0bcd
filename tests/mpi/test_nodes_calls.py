"""Calls: a function that the agent of one node calls for ranks of other nodes."""

from __future__ import annotations

import itertools
import logging
import time

import pytest

from hpcaccum import ConditionalAccumulator, deadline
from hpcaccum.mpi import Attempt
from hpcaccum.nodes import Agent, Calls
from hpcaccum.server import BoundedStalenessInbox

from .acting import VAIN, Background, at, everywhere, until
from .interrupting import at_each_point, interrupt
from .on_nodes import group_on_nodes, held_agent, named  # noqa: F401
from .support import meet


class Asked:
    """What was asked, on the rank whose agent answers."""

    def __init__(self):
        self.questions = []

    def note(self, rank, *question):
        self.questions.append((rank, *question))
        return len(self.questions), *question


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def calls(group, asked):
    made = Calls(group, root(group), asked.note, "calls")
    yield made
    made.free()


def root(group):
    """Return a rank whose node's agent answers."""
    return group.nodes[-1][-1]


def leader(group):
    """Return the rank whose agent answers."""
    return group.nodes[-1][0]


def far(group):
    """Return the ranks of other nodes."""
    return [rank for ranks in group.nodes[:-1] for rank in ranks]


def ask(calls, *question):
    calls.forget()
    return calls.call(*question)


def test_each_call_has_its_answer(calls, group, asked, rank):
    if rank in far(group):
        for number in range(20):
            assert ask(calls, rank, number)[1:] == (rank, number)
    meet()
    questions = at(leader(group), lambda: asked.questions)
    for each in far(group):
        mine = [question for question in questions if question[0] == each]
        assert mine == [(each, each, number) for number in range(20)]
    assert len(questions) == 20 * len(far(group))


def test_calls_of_several_objects_do_not_mix(calls, group, rank):
    other = Calls(group, root(group), lambda rank, word: ("other", word), "other")
    if rank in far(group):
        for number in range(10):
            assert ask(other, number) == ("other", number)
            assert ask(calls, number)[1:] == (number,)
    meet()
    other.free()


def test_what_was_not_sent_has_no_answer(calls, group):
    caller = far(group)[0]
    assert at(caller, calls.settle) is None
    assert at(caller, ask, calls, 7)[1:] == (7,)
    assert at(caller, calls.settle)[1:] == (7,)
    at(caller, calls.forget)
    assert at(caller, calls.settle) is None


def test_an_interrupted_call_is_settled(calls, group, asked):
    words = itertools.count()

    def trial(number):
        word = next(words)
        calls.forget()
        more = interrupt(lambda: calls.call(word), number)
        answer = calls.settle()
        assert answer is None or answer[1:] == (word,)
        return more, answer is None

    caller = far(group)[0]
    assert at(caller, at_each_point, trial, 1) == {False, True}
    # Without it, the next call must not get the answer to this one.
    for number in range(1, 30):
        at(caller, interrupt, lambda: ask(calls, "lost"), number)
        assert at(caller, ask, calls, number)[1:] == (number,)
    asked_for = at(leader(group), lambda: [word for _, word in asked.questions])
    ordinary = [word for word in asked_for if word != "lost"]
    assert len(set(ordinary[:-29])) == len(ordinary) - 29


def test_a_rank_that_waits_warns_and_names_the_agent(
    held, calls, group, caplog, monkeypatch
):
    monkeypatch.setattr(deadline, "FIRST_WARNING", VAIN)
    caller = far(group)[0]
    with caplog.at_level(logging.WARNING, "hpcaccum"), held:
        waiting = Background(caller, lambda: ask(calls, 7))
        at(caller, until, lambda: "waited" in caplog.text)
    assert waiting.result()[1:] == (7,)
    message = at(caller, lambda: caplog.text)
    assert "calls: waited" in message
    assert f"for the answer of the agent of {named(leader(group))}" in message


@pytest.fixture
def late(group, rank, monkeypatch):
    """Let the rank whose agent answers return late when it adds a service."""
    add = Agent.add

    def add_late(self, service):
        number = add(self, service)
        time.sleep(0.05 if rank == leader(group) else 0)
        return number

    monkeypatch.setattr(Agent, "add", add_late)


def test_a_rank_may_call_at_once(late, group, asked, rank):
    made = Calls(group, root(group), asked.note, "calls")
    if rank in far(group):
        assert ask(made, rank)[1:] == (rank,)
    meet()
    made.free()


def test_a_rank_may_submit_at_once(late, group, rank, monkeypatch):
    attempt = Attempt.__init__

    def make_late(self):
        time.sleep(0.02 if rank == leader(group) else 0)
        attempt(self)

    monkeypatch.setattr(Attempt, "__init__", make_late)
    host = root(group)
    inbox = BoundedStalenessInbox(group, host, 2, "float32")
    if rank in far(group):
        inbox.slot()[:] = 1
        assert inbox.submit(0)
    accumulator = ConditionalAccumulator("float32", (2,), comm=group, host=host)
    if rank in far(group):
        assert accumulator.apply_grad([1, 1])
    meet()
    accumulator.free()
    inbox.free()


def test_free_twice_is_once(group, asked):
    made = Calls(group, 0, asked.note, "calls")
    everywhere(made.free)
    everywhere(made.free)
