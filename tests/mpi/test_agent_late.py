"""An agent that does not answer within the limit, and its answer that comes later."""

from __future__ import annotations

import functools
import signal

import numpy as np
import pytest

from hpcaccum import ConditionalAccumulator, WaitTimeoutError
from hpcaccum.accumulator import recovery
from hpcaccum.deadline import Deadline, current_wait
from hpcaccum.nodes import Calls
from hpcaccum.server import BoundedStalenessInbox

from .acting import VAIN, Background, at, attempt, everywhere, same_bits, until
from .interrupting import at_each_point, interrupt
from .on_nodes import group_on_nodes, held_agent, named  # noqa: F401
from .serving import next_total
from .support import WAIT, meet

ELEMENTS = 6


@pytest.fixture
def host(group):
    """Return a rank on the node whose agent `held` stops."""
    return group.nodes[-1][-1]


@pytest.fixture
def caller(group):
    """Return a rank on another node."""
    return group.nodes[0][-1]


@pytest.fixture
def limit(monkeypatch):
    """Have a limit of 0.02 s for each wait in a block."""

    class Limit:
        def __enter__(self):
            monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.02")

        def __exit__(self, *error):
            meet()
            monkeypatch.delenv("HPCACCUM_TIMEOUT")

    return Limit()


@pytest.fixture
def acc(group, host):
    made = ConditionalAccumulator("float32", (ELEMENTS,), comm=group, host=host)
    yield made
    made.free()


@pytest.fixture
def inbox(group, host):
    made = BoundedStalenessInbox(group, host, ELEMENTS, "float32")
    yield made
    made.free()


def in_slot(acc, value):
    slot = acc.slot(timeout=WAIT)
    slot[:] = value
    return acc.apply_grad(slot, acc.global_step)


def copied(acc, value):
    return acc.apply_grad(np.full(ELEMENTS, value), acc.global_step)


def late(held, limit, caller, do, *args):
    """Have a rank call an agent that is held up, for longer than the limit."""
    with held, limit, pytest.raises(WaitTimeoutError):
        at(caller, do, *args)


def test_the_error_names_the_agent(held, limit, acc, caller, host, group):
    leader = group.nodes[-1][0]

    def apply():
        with pytest.raises(WaitTimeoutError) as caught:
            in_slot(acc, 1)
        # The traceback is that of one wait.
        assert caught.value.__context__ is None
        return str(caught.value)

    with held, limit:
        message = at(caller, apply)
    assert message.startswith("conditional_accumulator: apply_grad: waited 0.0")
    assert f"for the answer of the agent of {named(leader)}" in message


def test_nothing_else_is_done_before_the_answer(held, limit, acc, caller):
    with held, limit:
        for each in (in_slot, copied, copied):
            with pytest.raises(WaitTimeoutError, match="the answer of the agent"):
                at(caller, each, acc, 1)
        with pytest.raises(WaitTimeoutError, match="the answer of the agent"):
            at(caller, acc.slot)
    assert at(caller, copied, acc, 3)
    # What was in a slot counts; the two after it were not submitted.
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), np.full(ELEMENTS, 2, "f4"))
    assert acc.statistics().tally.accepted[caller] == 2


def test_a_take_of_the_rank_completes_its_gradient(held, limit, acc, caller, size):
    late(held, limit, caller, copied, acc, 4)
    assert at((caller + 1) % size, copied, acc, 8)
    # It would wait for itself.
    same_bits(at(caller, acc.take_grad, 1, timeout=WAIT), np.full(ELEMENTS, 8, "f4"))


def test_free_completes_a_gradient(held, limit, acc, caller):
    late(held, limit, caller, copied, acc, 4)
    everywhere(acc.free)
    assert not any(meet(acc._shared.writer._recovery.pending))


def test_a_free_that_waits_in_vain_fails_on_all_ranks(held, acc, caller, monkeypatch):
    finish = acc._shared.writer.finish

    def finish_soon():
        # The other ranks wait longer for this one than it waits for the agent.
        finish(Deadline(0.05, "free"))

    def apply():
        monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.02")
        try:
            return copied(acc, 4)
        finally:
            monkeypatch.delenv("HPCACCUM_TIMEOUT")

    with held:
        with pytest.raises(WaitTimeoutError):
            at(caller, apply)
        monkeypatch.setattr(acc._shared.writer, "finish", finish_soon)
        for _, error in meet(attempt(acc.free)):
            assert "the answer of the agent of" in str(error)
    monkeypatch.undo()
    everywhere(acc.free)


def test_a_slot_has_its_own_limit(held, limit, acc, caller):
    with held:
        with limit, pytest.raises(WaitTimeoutError):
            at(caller, copied, acc, 5)
        with pytest.raises(WaitTimeoutError, match=r"slot: waited .* answer of the"):
            at(caller, acc.slot, timeout=VAIN)


def test_another_thread_does_not_wait_longer_than_its_limit(held, acc, caller):
    with held:
        waiting = Background(caller, lambda: copied(acc, 4))
        at(caller, until, lambda: current_wait(waiting.thread.ident))
        for call in (acc.slot, functools.partial(acc.slot, 6)):
            with pytest.raises(WaitTimeoutError, match="for another thread of this"):
                at(caller, call, timeout=VAIN)
    assert waiting.result()
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.full(ELEMENTS, 4, "f4"))


@pytest.mark.parametrize("call", ["apply_grad", "submit"])
def test_an_interruption_ends_the_wait(held, acc, inbox, caller, monkeypatch, call):
    monkeypatch.setattr(recovery, "_GRACE", VAIN)

    def interrupted():
        def stop(*args):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, stop)
        try:
            signal.setitimer(signal.ITIMER_REAL, VAIN)
            with pytest.raises(KeyboardInterrupt):
                copied(acc, 4) if call == "apply_grad" else submit(inbox, 4)
        finally:
            signal.signal(signal.SIGALRM, before)

    with held:
        at(caller, interrupted)
    if call == "apply_grad":
        at(caller, acc.slot, timeout=WAIT)
        assert acc.statistics().tally.given_up[caller] == 1
    else:
        at(caller, inbox._recovery.finish)
        assert inbox.tally().accepted[caller] == 1


# What a rank calls next, and which gradients it adds.
GO_ON = {
    "slot": (lambda acc: acc.slot(timeout=WAIT).fill(9), []),
    "apply_grad": (lambda acc: copied(acc, 6), [6]),
    "leave": (lambda acc: acc._shared.leave(), []),
}


@pytest.mark.parametrize("go_on", GO_ON)
@pytest.mark.parametrize("apply", [in_slot, copied])
def test_only_what_is_in_a_slot_counts_when_the_answer_comes(
    held, limit, acc, caller, size, apply, go_on
):
    late(held, limit, caller, apply, acc, 4)
    call, more = GO_ON[go_on]
    at(caller, call, acc)
    other = (caller + 1) % size
    assert at(other, copied, acc, 8)
    # The caller's array may have changed meanwhile, a slot may not.
    values = [4] * (apply is in_slot) + more + [8]
    mean = at(0, acc.take_grad, len(values), timeout=WAIT)
    same_bits(mean, np.full(ELEMENTS, np.mean(values), "f4"))
    tally = acc.statistics().tally
    assert tally.accepted[caller] == len(values) - 1
    assert tally.given_up[caller] == (apply is copied)
    assert acc.num_accumulated() == 0


def submit(inbox, value):
    inbox.slot()[:] = value
    return inbox.submit(0)


def test_a_submission_counts_when_the_answer_comes(held, limit, inbox, caller, host):
    with held, limit:
        for call in (functools.partial(submit, inbox, 5), inbox.slot, inbox.leave):
            with pytest.raises(
                WaitTimeoutError, match=r"gradients: submit: .* answer of"
            ):
                at(caller, call)
    # This waits for the answer, and no longer: the first one is not applied.
    at(caller, inbox._recovery.finish)
    assert inbox.tally().accepted[caller] == 1
    with limit, pytest.raises(WaitTimeoutError, match="update 1, this rank's last"):
        at(caller, submit, inbox, 6)
    same_bits(at(host, next_total, inbox, 0, ELEMENTS), np.full(ELEMENTS, 5.0))
    assert at(caller, submit, inbox, 6)
    same_bits(at(host, next_total, inbox, 1, ELEMENTS), np.full(ELEMENTS, 6.0))
    at(caller, inbox.leave)
    assert inbox.left() == [caller]


@pytest.mark.parametrize("apply", [in_slot, copied])
def test_a_recovery_may_be_interrupted(acc, caller, apply, monkeypatch):
    receive = Calls._receive

    def receive_no_more(calls):
        return receive(calls) if calls._answers else None

    def count():
        tally = acc.statistics().tally
        return tally.accepted[caller], tally.given_up[caller]

    def trial(number):
        accepted, given_up = count()
        with monkeypatch.context() as patch:
            patch.setenv("HPCACCUM_TIMEOUT", "1e-9")
            # The agent may answer before the first look.
            patch.setattr(Calls, "_receive", receive_no_more)
            with pytest.raises(WaitTimeoutError):
                apply(acc, 4)
        more = interrupt(lambda: acc.slot(timeout=WAIT), number)
        acc.slot(timeout=WAIT)
        if apply is in_slot:
            same_bits(acc.take_grad(1, timeout=WAIT), np.full(ELEMENTS, 4, "f4"))
        there = apply is in_slot
        assert count() == (accepted + there, given_up + (not there))
        assert acc.num_accumulated() == 0
        return more, None

    at(caller, at_each_point, trial, 11)


def test_free_waits_for_the_answer(held, group, host, caller, monkeypatch):
    calls = Calls(group, host, lambda rank, word: word, "calls")

    def extend():
        calls._deadline = Deadline(0.05, "calls")

    def ask():
        # The other ranks wait longer for this one than it waits for the agent.
        monkeypatch.setattr(calls, "extend", extend)
        calls.forget()
        return calls.call(7)

    with held:
        with pytest.raises(WaitTimeoutError):
            at(caller, ask)
        for each, (_, error) in enumerate(meet(attempt(calls.free))):
            assert "the answer of the agent of" in str(error)
            assert f"rank {caller}: waited" in str(error) or each == caller
    everywhere(calls.free)
