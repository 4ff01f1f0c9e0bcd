"""Optimizers that resume from a saved state continue as if never interrupted."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

import hpcaccum as hpc

from .support import WAIT
from .training import ONE_SIDED, WRAPPERS, gives, meet, raised, turns, variable

CALLS = 7


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))


@pytest.fixture
def wrapper(request, comm):
    """Return a function that makes an optimizer; all are freed after the test."""
    made = []

    def make(kind, variables):
        made.append(WRAPPERS[kind](hpc.SGD(1), variables, comm))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.free()


def fresh(value=0.0):
    return [variable(np.full(3, float(value)), name="w"), variable(5.0, name="v")]


def resumed(make, kind, opt, own):
    """Return a new optimizer, with new variables, in the state of another one."""
    state, values = copy.deepcopy(opt._state_dict()), [var.value.copy() for var in own]
    start = [opt.center(var) for var in own] if kind in ONE_SIDED else values
    meet()
    opt.free()
    new = [
        variable(value, name=var.name) for value, var in zip(start, own, strict=True)
    ]
    opt = make(kind, new)
    opt._load_state_dict(state)
    opt.initialize(new)
    for var, value in zip(new, values, strict=True):
        var.value[...] = value
    meet()
    return opt, new


def train(make, kind, size, stops):
    """Return the results of all calls; the optimizer is replaced at some of them."""
    own, found = fresh(), []
    opt = make(kind, own)
    opt.initialize(own)

    def act(call, turn=0):
        grad = turn + 2.0 * call
        if kind in ONE_SIDED:
            # Brings the newest step to this node, as a resumed one has it.
            opt.center(own[0])
        receipt = opt.minimize(gives(np.full(3, grad), None if grad % 3 == 0 else grad))
        return receipt, [var.value.tolist() for var in own]

    for call in range(CALLS):
        if call in stops:
            opt, own = resumed(make, kind, opt, own)
        if kind in ("DropStale", "AGN"):
            found.append(turns(range(size), functools.partial(act, call)))
        else:
            found.append(act(call))
        meet()
    opt.free()
    if kind in ONE_SIDED:
        found.append((opt.global_step, opt.statistics()))
    return [*found, [var.value.tolist() for var in own]]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_resumed_optimizer_continues(wrapper, kind, size):
    expected = train(wrapper, kind, size, ())

    for stops in [(1,), (2,), (3, 4), (CALLS - 1,)]:
        assert train(wrapper, kind, size, stops) == expected


@pytest.mark.ranks(min=2)
def test_a_resumed_gradient_has_its_lag(comm, rank, size):
    def start(center, state=None):
        w = variable(center)
        opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1), 1, comm=comm)
        if state is not None:
            opt._load_state_dict(state)
        opt.initialize([w])
        return opt, w

    opt, w = start(0.0)
    opt.compute_gradients(gives(1.0))
    meet()
    turns([0], lambda _: opt.minimize(gives(1.0)))
    state, center = opt._state_dict(), float(opt.center(w))
    meet()
    opt.free()
    opt, w = start(center, state)
    late = turns([size - 1] * 2, lambda _: opt.apply_gradients([(1.0, w)]))
    opt.free()

    assert late == [hpc.Receipt(True, 0, 1), hpc.Receipt(False, 0, 2)]
    assert opt.statistics().lags == {0: 1, 1: 1, 2: 1}
    assert w.value == -2


@pytest.mark.ranks(min=2)
def test_a_resumed_rank_remembers_discarded_gradients(wrapper, rank, size):
    [w, _] = fresh()
    opt = wrapper("CrossShard", [w])
    for _ in range(3):
        opt.compute_gradients(gives(np.ones(3)), [w])
    state = opt._state_dict()
    opt = wrapper("CrossShard", [w])
    if rank == 0:
        opt._load_state_dict(state)
    error = raised(opt.minimize, gives(np.ones(3)), var_list=[w])

    assert type(error) is hpc.DisagreementError
    assert "rank 0 has 4, rank 1 has 1" in str(error)


def test_the_state_of_nested_optimizers_is_nested(wrapper, comm):
    inner = wrapper("CrossShard", fresh())
    with hpc.CrossShardOptimizer(inner, comm=comm) as outer:
        outer.minimize(gives(np.ones(3), 1.0), var_list=fresh())
        state = outer._state_dict()
        inner._load_state_dict({"computed": 7})
        outer._load_state_dict(state)

        assert state == {"inner": {"computed": 1}, "computed": 1}
        assert inner._state_dict() == {"computed": 1}
