"""An agent that does not answer within the limit, and its answer that comes later."""

import functools

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import ConditionalAccumulator, WaitTimeoutError, deadline
from hpcaccum.deadline import current_wait
from tests import internals

from ..common import VAIN, WAIT, same_bits
from .acting import Background, at, attempt, everywhere, interrupted, until
from .on_nodes import named
from .support import meet
from .training import started

ELEMENTS = 6
# To ask for the step would need the agent.
ANY_STEP = 99


@pytest.fixture
def host(group):
    """Return a rank on the node whose agent `held` stops."""
    return group.nodes[-1][-1]


@pytest.fixture
def caller(group):
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
def acc(group, host, keep):
    options = {"comm": group, "host": host}
    # A gradient that is in no slot is not sent with the request.
    with internals.limits(short=0):
        yield keep(ConditionalAccumulator("float32", (ELEMENTS,), **options))


def in_slot(acc, value):
    slot = acc.slot(timeout=WAIT)
    slot[:] = value
    return acc.apply_grad(slot, ANY_STEP)


def copied(acc, value):
    return acc.apply_grad(np.full(ELEMENTS, value), ANY_STEP)


def late(held, limit, caller, do, *args):
    """Have a rank call an agent that is held up, for longer than the limit."""
    with held, limit, pytest.raises(WaitTimeoutError):
        at(caller, do, *args)


def test_nothing_else_is_done_before_the_answer(held, limit, acc, caller, group):
    def in_vain(call):
        with pytest.raises(WaitTimeoutError) as caught:
            call(acc, 1)
        # The traceback is that of one wait.
        assert caught.value.__context__ is None
        return str(caught.value)

    with held:
        with limit:
            for each in (in_slot, copied, copied):
                message = at(caller, in_vain, each)
                start = "conditional_accumulator: apply_grad: waited "
                assert message.startswith(start)
                agent = named(group.nodes[-1][0])
                assert f"for the answer of the agent of {agent}" in message
        with pytest.raises(WaitTimeoutError, match=r"slot: waited .* answer of the"):
            at(caller, acc.slot, timeout=VAIN)
    assert at(caller, copied, acc, 3)
    # What was in a slot counts; the two after it were not submitted.
    same_bits(at(0, acc.take_grad, 2, timeout=WAIT), np.full(ELEMENTS, 2, "f4"))
    assert acc.statistics().tally.accepted[caller] == 2


def test_a_take_names_the_agent_that_does_not_answer(held, acc, caller, group, size):
    everywhere(copied, acc, 1)
    with held, internals.limits(grace=VAIN):
        # The end of the first one comes before the second one.
        for _ in range(2):
            with pytest.raises(WaitTimeoutError) as caught:
                at(caller, acc.take_grad, size, timeout=VAIN)
            late = f"s for the answer of the agent of {named(group.nodes[-1][0])}"
            assert str(caught.value).endswith(late)
    mean = at(caller, acc.take_grad, size, timeout=WAIT)
    same_bits(mean, np.ones(ELEMENTS, "f4"))


def test_a_take_of_the_rank_completes_its_gradient(held, limit, acc, caller, size):
    late(held, limit, caller, copied, acc, 4)
    assert at((caller + 1) % size, copied, acc, 8)
    # It would wait for itself.
    same_bits(at(caller, acc.take_grad, 1, timeout=WAIT), np.full(ELEMENTS, 8, "f4"))


def test_free_completes_a_gradient(held, limit, acc, caller):
    late(held, limit, caller, copied, acc, 4)
    everywhere(acc.free)


def test_a_slot_that_asks_the_agent_has_its_limit(held, acc, caller):
    # The last rounds that are known to this rank have both of its buffers.
    for _ in range(2):
        assert at(caller, copied, acc, 5)
        at(0, acc.take_grad, 1, timeout=WAIT)
    late = pytest.raises(WaitTimeoutError, match=r"slot: waited .* answer of the")
    with held, internals.limits(grace=VAIN), late:
        at(caller, acc.slot, timeout=VAIN)
    # It looks once, also without time.
    at(caller, acc.slot, timeout=0)


def test_another_thread_does_not_wait_longer_than_its_limit(held, acc, caller):
    with held:
        waiting = Background(caller, lambda: copied(acc, 4))
        at(caller, until, lambda: current_wait(waiting.thread.ident))
        for call in (acc.slot, functools.partial(acc.slot, 6)):
            with pytest.raises(WaitTimeoutError, match="for another thread of this"):
                at(caller, call, timeout=VAIN)
    assert waiting.result()
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.full(ELEMENTS, 4, "f4"))


# What a rank calls next, and which gradients it adds.
GO_ON = {
    "slot": (lambda acc: acc.slot(timeout=WAIT).fill(9), []),
    "apply_grad": (lambda acc: copied(acc, 6), [6]),
    "leave": (lambda acc: acc.leave(), []),
}


@pytest.mark.parametrize(
    ("go_on", "apply", "short"),
    [
        ("slot", in_slot, 0),
        ("apply_grad", copied, 0),
        ("apply_grad", copied, 1 << 13),
        ("leave", in_slot, 0),
        ("leave", copied, 0),
    ],
)
def test_only_what_was_sent_or_is_in_a_slot_counts_when_the_answer_comes(
    held, limit, acc, caller, size, apply, go_on, short
):
    call, more = GO_ON[go_on]
    with internals.limits(short=short):
        late(held, limit, caller, apply, acc, 4)
        at(caller, call, acc)
    other = (caller + 1) % size
    assert at(other, copied, acc, 8)
    # The caller's array may have changed meanwhile, a slot may not.
    counts = apply is in_slot or short > 0
    values = [4] * counts + more + [8]
    mean = at(0, acc.take_grad, len(values), timeout=WAIT)
    same_bits(mean, np.full(ELEMENTS, np.mean(values), "f4"))
    found = acc.statistics()
    assert found.tally.accepted[caller] == len(values) - 1
    assert found.num_lost == (not counts)
    assert acc.num_accumulated() == 0


def test_an_interruption_ends_the_wait(held, acc, caller, size):
    with held:
        at(caller, interrupted, copied, acc, 4)
    at(caller, acc.slot, timeout=WAIT)
    assert at((caller + 1) % size, copied, acc, 8)
    same_bits(at(0, acc.take_grad, 1, timeout=WAIT), np.full(ELEMENTS, 8, "f4"))
    assert (acc.statistics().num_lost, acc.statistics().lost) == (1, ())


def test_a_free_that_waits_in_vain_fails_on_all_ranks(
    held, acc, caller, rank, monkeypatch
):
    with held:
        with monkeypatch.context() as patch:
            patch.setenv("HPCACCUM_TIMEOUT", "0.02")
            with pytest.raises(WaitTimeoutError):
                at(caller, copied, acc, 4)
            # The other ranks wait longer for this one than it waits for the agent.
            patch.setenv("HPCACCUM_TIMEOUT", str(10 * VAIN))
            patch.delenv("HPCACCUM_TIMEOUT") if rank != caller else None
            outcomes = meet(attempt(acc.free))
        for _, error in outcomes:
            assert "the answer of the agent of" in str(error)
    everywhere(acc.free)


def test_an_update_counts_when_the_answer_comes(held, limit, group, caller, host):
    w = hpc.Variable(np.zeros(ELEMENTS), "w")
    opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1), 9, comm=group, host=host)
    opt.initialize([w])

    def push(value):
        return internals.push(opt, {"w": np.full(ELEMENTS, value)}, 0)

    with held, limit:
        for call in (lambda: push(5.0), opt.gradient_arrays, opt.leave):
            with pytest.raises(WaitTimeoutError, match=r"submit: .* answer of"):
                at(caller, call)
    # This waits for the answer; the first gradient counts.
    assert at(caller, push, 6.0)
    at(caller, opt.leave)
    assert opt.statistics().accepted[caller] == 2
    opt.free()
    same_bits(w.value, np.full(ELEMENTS, -11.0))


def test_a_pull_that_warns_does_not_wait_for_the_agent(
    held, group, caller, host, caplog, monkeypatch
):
    w = hpc.Variable(np.zeros(ELEMENTS), "w")
    opt = started(hpc.SyncReplicasOptimizer(hpc.SGD(1), 1, comm=group, host=host), [w])
    monkeypatch.setattr(deadline, "FIRST_WARNING", VAIN)
    with caplog.at_level("WARNING", "hpcaccum"), held, internals.limits(grace=VAIN):
        pulling = Background(caller, lambda: internals.wait_for(opt, 1))
        # What the update waits for is in words of the host's node.
        at(caller, until, lambda: "pull: waited" in caplog.text)
    assert at(host, internals.push, opt, {"w": np.ones(ELEMENTS)}, 0)
    pulling.result()
    opt.free()
    message = at(caller, lambda: caplog.text)
    assert f"s for the answer of the agent of {named(group.nodes[-1][0])}" in message
