"""A rule that updates all variables at once, as one flat vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.optimizers.update_rule import Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.base import Optimizer
    from hpcaccum.optimizers.rule_state import State
    from hpcaccum.optimizers.variable import Variable


class FlatRule:
    """The updates of a `Rule`, for a server that divides them among ranks.

    Args:
        rule: Makes the updates.

    Attributes:
        slots: Name to initial value of its slots.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.slots: Mapping[str, float] = rule._slots()
        # On the rank that counts updates.
        self._states: Sequence[State] = ()

    def set_variables(
        self, variables: Sequence[Variable], slots: Mapping[str, Mapping[str, Array]]
    ) -> None:
        """Let the rule keep its slots in given arrays."""
        self._states = [
            self._rule._states.make(
                var, {slot: slots[slot][var.name] for slot in slots}
            )
            for var in variables
        ]

    def move_slots(self) -> None:
        """Move the slots to memory of their own, before the arrays are freed."""
        for state in self._states:
            state.move_slots()

    def numbers(self) -> tuple[float, ...] | None:
        """Return the numbers of the next update of all variables.

        Returns:
            None if the variables have had different numbers of updates.
        """
        earlier = {state.updates for state in self._states}
        if len(earlier) != 1:
            return None
        step = earlier.pop()
        return self._rule._numbers(self._rule._rate.at(lambda: step), step + 1)

    def count(self) -> None:
        """Count an update of all variables; the first makes their state visible."""
        for state in self._states:
            self._rule._state(state.variable).count()

    def update(
        self,
        value: Array,
        grad: Array,
        slots: Sequence[Array],
        scratch: Array,
        numbers: Sequence[float],
    ) -> None:
        """Update some elements of the variables and of the slots."""
        self._rule._update(value, grad, *slots, scratch, *numbers)


def flat_rule(optimizer: Optimizer) -> FlatRule | None:
    """Return the updates of an optimizer as those of a vector, None if they are not.

    An optimizer of the user may be elementwise, but only a `Rule` can update pieces.
    """
    if isinstance(optimizer, Rule) and optimizer.elementwise:
        return FlatRule(optimizer)
    return None
