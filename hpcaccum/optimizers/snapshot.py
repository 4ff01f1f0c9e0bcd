"""The state that rules keep of variables, and snapshots of variables and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcaccum.accumulator import Tally
from hpcaccum.arguments import step_number
from hpcaccum.device import copyto, cupy, is_device, to_host
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.variable import Variable, is_integer
from hpcaccum.server import check_first_step

# Name of each slot to its initial value, or to an array with it.
Slots = Mapping[str, float] | Mapping[str, Array]

# Maps names of slots of a variable to arrays, and those of counts to integers.
Parts = Mapping[str, Any]
# Names of a variable and of a part of its state.
Key = tuple[str, str]

# The part that is the number of updates of a variable.
COUNT = "step"


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
        self.counter: Any = memoryview(self.step.value)  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """The number of updates of the variable."""
        return self.counter[()]  # type: ignore[no-any-return]

    def count(self) -> int:
        """Count an update; return its number, from 1."""
        number: int = self.counter[()] + 1
        self.counter[()] = number
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


# Snapshots


def snapshot_of(
    values: Mapping[str, Array], state: Mapping[Key, Any]
) -> dict[str, Any]:
    """Return a snapshot of variables and of their state; arrays are copied."""
    states: dict[str, dict[str, Any]] = {name: {} for name in values}
    for (name, part), value in state.items():
        states[name][part] = value if isinstance(value, int) else _copied(value)
    copies = {name: _copied(value) for name, value in values.items()}
    return {"variables": copies, "state": states}


def together(snapshots: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one snapshot of the variables of several, which have counts."""
    first, *others = snapshots
    found = {name: {**first[name]} for name in ("variables", "state")}
    step, tally = first["global_step"], Tally.of_lists(first["tally"])
    for each in others:
        for name, parts in found.items():
            parts.update(each[name])
        step, tally = step + each["global_step"], tally + Tally.of_lists(each["tally"])
    return {**found, "global_step": step, "tally": tally.as_lists()}


def plain(variable: Variable) -> Any:
    """Return the array of a variable, or its value if it is a count."""
    is_count = is_integer(variable.dtype) and variable.shape == ()
    return variable.value.item() if is_count else variable.value


def _copied(array: Array) -> Array:
    return np.array(to_host(array))


def counts_of(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step and the tally of a snapshot, if it has them."""
    tally = snapshot.get("tally")
    step = step_number(snapshot.get("global_step", 0), "global_step")
    check_first_step(step, "global_step")
    return {
        "step": step,
        "tally": None if tally is None else Tally.of_lists(tally),
    }


def check_snapshot(snapshot: Any, variables: Sequence[Variable]) -> None:
    """Raise unless a snapshot has the values of these variables."""
    if not isinstance(snapshot, Mapping) or not snapshot.keys() >= {
        "variables",
        "state",
    }:
        raise TypeError(f"snapshot must come from an optimizer, got {_kind(snapshot)}")
    values, names = snapshot["variables"], [var.name for var in variables]
    if set(values) != set(names):
        raise InvalidArgumentError(
            f"the snapshot has different variables: it has {sorted(values)}, the "
            f"optimizer has {sorted(names)}"
        )
    for var in variables:
        check_array(f"variable {var.name!r}", values[var.name], var.value)


def _kind(snapshot: Any) -> str:
    if isinstance(snapshot, Mapping):
        item = '; pass its item "optimizer"' * ("optimizer" in snapshot)
        return f"a mapping with {sorted(map(str, snapshot))}{item}"
    return "None" if snapshot is None else f"a {type(snapshot).__name__}"


def check_array(what: str, array: Any, like: Array) -> None:
    """Raise unless an array of a snapshot has the shape and the dtype of another."""
    found = np.asarray(array)
    if (found.shape, found.dtype) != (like.shape, like.dtype):
        raise InvalidArgumentError(
            f"{what} is {like.dtype} {like.shape}, in the snapshot it is {found.dtype} "
            f"{found.shape}"
        )


def set_values(variables: Sequence[Variable], snapshot: Mapping[str, Any]) -> None:
    """Copy a snapshot to variables."""
    for var in variables:
        copyto(var.value, snapshot["variables"][var.name])
