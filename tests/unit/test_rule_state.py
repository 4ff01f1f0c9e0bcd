"""The state that a rule keeps of its variables, after an interrupt."""

from __future__ import annotations

import numpy as np

from hpcaccum.optimizers.flat_rule import FlatRule
from hpcaccum.optimizers.rules import Momentum
from hpcaccum.optimizers.variable import Variable

from ..mpi.interrupting import at_each_point, interrupt

NAMES = "abc"


def variables():
    return [Variable(np.zeros(2, np.float32), name) for name in NAMES]


def test_an_interrupted_update_keeps_the_slots():
    """Those of a server are in memory that it shares with other ranks."""

    def trial(number):
        rule, given = Momentum(1.0, 0.5), variables()
        slots = {name: np.ones(2, np.float32) for name in NAMES}
        flat = FlatRule(rule)
        flat.set_variables(given, {"momentum": slots})
        more = interrupt(flat.count, number)
        flat.count()
        for var in given:
            assert rule.get_slot(var, "momentum").value is slots[var.name]
        return more, None

    at_each_point(trial)


def test_an_interrupted_restore_keeps_the_slots():
    def trial(number):
        rule, given = Momentum(1.0, 0.5), variables()
        rule.initialize(given)
        states = [rule._states.make(var, {}) for var in given]
        for state in states:
            state.count()
        more = interrupt(lambda: rule._state_changed(given), number)
        rule._state_changed(given)
        assert [rule._state(var) for var in given] == states
        return more, None

    at_each_point(trial)
