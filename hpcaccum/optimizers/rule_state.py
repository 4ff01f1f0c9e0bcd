"""The state that a rule keeps of its variables: slots, and numbers of updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.device import cupy, is_device
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.optimizers.snapshot import COUNT
from hpcaccum.optimizers.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum.dtypes import Array

    # Name of each slot to its initial value, or to an array with it.
    Slots = Mapping[str, float] | Mapping[str, Array]


class State:
    """The state of one variable of floats: its slots and the number of its updates.

    All its fields are Variables, whose values may be set.
    """

    def __init__(self, variable: Variable, name: str, slots: Slots) -> None:
        title = f"{variable.name}/{name}"
        dtype = accumulation_dtype(variable.dtype)
        self.variable, self.on_device = variable, is_device(variable.value)
        self.slots = {
            slot: Variable(
                _filled(variable.value, start, dtype)
                if isinstance(start, float)
                else start,
                f"{title}/{slot}",
                False,
            )
            for slot, start in slots.items()
        }
        self.step = Variable(np.zeros((), np.int64), f"{title}/step", trainable=False)
        # Reads and writes the same number several times as fast.
        self._count: Any = memoryview(self.step.value)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """The number of updates of the variable."""
        return self._count[()]  # type: ignore[no-any-return]

    def count(self) -> int:
        """Count an update; return its number, from 1."""
        number: int = self._count[()] + 1
        self._count[()] = number
        return number

    def parts(self) -> dict[str, Variable]:
        """Return what a snapshot has of it, by name."""
        return {**self.slots, COUNT: self.step}

    def move_slots(self) -> None:
        """Move the slots to memory of their own."""
        for slot in self.slots.values():
            slot._move_to(slot.value.copy())


def _filled(like: Array, number: float, dtype: np.dtype[Any]) -> Array:
    if is_device(like):
        return cupy().full(like.shape, number, dtype)  # type: ignore[no-any-return]
    if number == 0:
        # Takes memory as it is written to: gradients of rows may write to few of them.
        return np.zeros(like.shape, dtype, "F" if like.flags.fnc else "C")
    return np.full_like(like, number, dtype, subok=False)
