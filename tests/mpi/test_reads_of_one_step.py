"""Several values that are read from a busy server are of one step."""

import threading

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, deadline
from tests import internals

from ..common import VAIN, WAIT, check_error
from .acting import until
from .support import meet
from .training import ONE_SIDED, WRAPPERS, Gate, gives, raised, started, variable

pytestmark = pytest.mark.any_size


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.ranks(min=2)
def test_centers_of_several_variables_are_of_one_step(comm, rank, size, slow):
    kinds, calls = ("f2", "f4", "f8"), 50
    variables = [variable(np.zeros(3), kind, kind) for kind in kinds]
    with started(ONE_SIDED["DropStale"](hpc.SGD(1), variables, comm), variables) as opt:
        meet()
        if rank == size - 1:
            # Meanwhile others make several updates.
            with internals.slow_reads(0.002 * slow):
                while opt.global_step < calls * (size - 1):
                    read = opt.center(tuple(variables))
                    assert [array.dtype for array in read] == [*kinds]
                    assert len({float(x) for array in read for x in array}) == 1
        else:
            for _ in range(calls):
                opt.minimize(gives(*(np.ones(3, var.dtype) for var in variables)))
        meet()
    expected = [-calls * (size - 1)] * 3
    assert [array[0] for array in opt.center(variables)] == expected


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_the_center_of_an_unknown_variable_is_refused(comm, kind):
    w = variable()
    with started(ONE_SIDED[kind](hpc.SGD(1), [w], comm), [w]) as opt:
        for bad in (variable(), [w, variable(name="v")]):
            assert isinstance(raised(opt.center, bad), InvalidArgumentError)
        assert type(raised(opt.center, "w")) is TypeError


class Halves(hpc.SGD):
    """SGD(1) with a slot whose halves it changes one after the other, with a stop."""

    def __init__(self, own):
        super().__init__(1)
        # The variable of this rank, which has no slot, unlike that of the center.
        self.own = own
        self.slot = hpc.Variable(np.zeros(4), "slot")
        self.stopped, self.go = threading.Event(), threading.Event()

    def get_slot(self, var, name):
        return None if var is self.own else self.slot

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        self.slot.value[:2] += 1
        super().apply_gradients(grads_and_vars)
        self.stopped.set()
        assert self.go.wait(WAIT)
        self.slot.value[2:] += 1


def test_a_slot_of_the_center_is_never_half_updated(comm, rank, size):
    w, found = variable(), []
    inner = Halves(w)
    with started(hpc.DropStaleGradientOptimizer(inner, 9, comm=comm), [w]) as opt:
        if rank == 0:
            push = threading.Thread(target=opt.minimize, args=(gives(1.0),))
            push.start()
            assert inner.stopped.wait(WAIT)

            def read():
                slot = opt.get_slot(w, "slot")
                found.append(slot.value.tolist())
                slot.value[...] = 7

            reader = threading.Thread(target=read)
            reader.start()
            reader.join(VAIN)
            inner.go.set()
            reader.join(WAIT)
            push.join(WAIT)
        meet()
    if rank == 0:
        assert found == [[1.0] * 4]
        assert inner.slot.value.tolist() == [1.0] * 4


def test_updates_wait_while_they_are_paused(comm, rank, size):
    w, v, found = variable(np.zeros(3)), variable(name="v"), []
    with ONE_SIDED["DropStale"](hpc.Momentum(1, 1), [w, v], comm) as opt:
        opt.initialize([w, v])
        opt.minimize(gives(np.ones(3), 1.0))
        meet()
        if rank == 0:
            with opt.paused() as step:
                meet("paused")
                until(lambda: sum(opt.statistics().accepted) == 2 * size - 1)
                slots = [opt.get_slot(each, "momentum").value for each in (w, v)]
                found += [step, opt.global_step]
                found += [array.max() for array in [*slots, *opt.center([w, v])]]
        else:
            meet()
            opt.minimize(gives(np.ones(3), 1.0))
    if rank == 0:
        # 1 + 2 + ... + size, as the momentum grows by 1 each time.
        total = -size * (size + 1) / 2
        assert found == [size, size, size, size, total, total]
    assert opt.global_step == 2 * size - 1


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_call_that_would_wait_for_a_paused_update_is_refused(comm, kind, rank):
    w = variable()
    opt = started(ONE_SIDED[kind](hpc.SGD(1), [w], comm), [w])
    if rank == 0:
        with opt.paused(), opt.paused() as step:
            calls = [lambda: [opt.minimize(gives(1.0)) for _ in range(2)], opt.free]
            errors = [raised(call) for call in calls]
            assert step == opt.global_step == 0
        for error in errors:
            check_error(error, "updates, which are paused")
    else:
        error = raised(lambda: opt.paused().__enter__())
        check_error(error, "snapshot() does; call it on rank 0")
    meet()
    opt.free()
    if rank == 0:
        with opt.paused() as step:
            assert step == opt.global_step


def test_an_update_may_read_what_it_changes(comm, rank):
    def rate():
        with opt.paused() as step:
            slot = opt.get_slot(w, "momentum")
            seen.append((step, float(opt.center(w)), slot and float(slot.value)))
        return 1.0

    w, seen = variable(), []
    with WRAPPERS["SyncReplicas"](hpc.Momentum(rate, 0.5), [w], comm) as opt:
        opt.initialize([w])
        for _ in range(2):
            opt.minimize(gives(1.0))
    if rank == 0:
        assert seen == [(0, 0.0, None), (1, -1.0, 1.0)]


def test_a_read_that_waits_too_long_names_what_it_waits_for(comm, rank, in_vain):
    w, begun, go = variable(), threading.Event(), threading.Event()

    def update():
        begun.set()
        assert go.wait(WAIT)

    with started(ONE_SIDED["DropStale"](Gate(update), [w], comm), [w]) as opt:
        meet()
        if rank == 0:
            internals.push(opt, {"w": np.ones(())}, 0)
            assert begun.wait(WAIT)
            message = in_vain(opt.paused().__enter__)
            go.set()
            assert "for an update of this rank to end" in message
            with opt.paused() as step:
                assert opt.center(w) == -step


def test_an_update_that_waits_for_a_reader_is_reported(comm, rank, monkeypatch, caplog):
    monkeypatch.setattr(deadline, "FIRST_WARNING", VAIN)
    w = variable()
    with ONE_SIDED["DropStale"](hpc.SGD(1), [w], comm, name="mine") as opt:
        opt.initialize([w])
        meet()
        if rank == 0:
            push = threading.Thread(target=opt.minimize, args=(gives(1.0),))
            with opt.paused():
                push.start()
                until(lambda: "mine: update: waited " in caplog.text)
                assert opt.center(w) == 0
            push.join(WAIT)
            assert " for a read of this rank to end" in caplog.text
            assert opt.center(w) == -1
