"""The base of the update rules: how they use learning rate, state, and memory.

A rule changes arrays in place: those in CPU memory in pieces, those on a device by
`device_update`. Half precision is computed in float32, and so is its state.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np

from hpcaccum.arguments import step_number
from hpcaccum.device import cupy, tables
from hpcaccum.dtypes import Array, accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.base import KeptState, Optimizer
from hpcaccum.optimizers.checks import (
    PairsLike,
    Variables,
    as_pairs,
    check_global_step,
    check_gradient,
)
from hpcaccum.optimizers.device_update import Plan
from hpcaccum.optimizers.slices import Gradient, apart
from hpcaccum.optimizers.snapshot import COUNT, Key, Slots, State, check_array
from hpcaccum.optimizers.variable import Variable, is_float
from hpcaccum.rows import IndexedSlices, Rows, rows_of
from hpcaccum.spans import traced

# Called with pieces of the value, of the gradient and of the slots, with working
# memory of the same size, and with numbers. The arrays are vectors of one dtype.
Update = Callable[..., None]

# A learning rate: a number, or a callable that returns one.
Rate = float | Callable[[], float] | Callable[[int], float]

# Pairs of which no gradient is None.
Given = Sequence[tuple[Gradient, Variable]]


class Rule(Optimizer):
    """An optimizer that changes each variable by its own gradient, on this rank.

    A gradient may be an `IndexedSlices`. Then only its rows are updated in the variable
    and the slots: time grows with the number of rows, not with the size of the
    variable. Repeated rows are added first.

    Variables are independent: two threads may apply gradients to different variables at
    the same time. The slots of half-precision variables are float32.

    Only the learning rate can be changed later. Setting another attribute raises
    AttributeError, which reveals misspelled names.

    Args:
        learning_rate: A number of at least 0; or a callable that returns one. It is
            called at each `apply_gradients`: without arguments or, if it requires one,
            with the number of earlier updates (the largest of these variables).
        name: Part of the names of its state.

    Raises:
        InvalidArgumentError: If an argument is not a number or is out of range.
    """

    __slots__ = ("_on_device", "_rate", "_scratch", "_states")

    # Whether the update depends on the number of earlier ones.
    _counts: ClassVar[bool] = False
    # The kernel of kernels/update.cu for the same update.
    _kernel: str

    def __init__(self, learning_rate: Rate, name: str) -> None:
        super().__init__(name)
        self._rate = RateOfStep(learning_rate)
        # Those of variables that have not been updated yet are not visible.
        self._states: dict[Variable, State] = {}
        self._on_device = tables.RecentTables(Plan)
        self._scratch = Scratch()

    @property
    def learning_rate(self) -> Rate:
        """The given number or callable; may be set at any time, by any thread.

        The next update uses it. It is checked as in the constructor.
        """
        return self._rate.given  # type: ignore[no-any-return]

    @learning_rate.setter
    def learning_rate(self, rate: Rate) -> None:
        self._rate = RateOfStep(rate)

    def __repr__(self) -> str:
        """Show the options: the same text on ranks with the same options."""
        rate = "callable" if callable(self.learning_rate) else self.learning_rate
        options = {"learning_rate": rate, **self._options(), "name": self._name}
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__name__}({text})"

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled: the copy would have no variables."""
        text = f"{self!r} cannot be copied or pickled; snapshot() returns its state"
        raise TypeError(text)

    def _options(self) -> dict[str, Any]:
        """Return the arguments other than learning rate and name."""
        return {}

    def _slots(self) -> dict[str, float]:
        """Return the names of the slots and their initial values."""
        return {}

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        """Return the numbers of an update, from 1; only the first may depend on it."""
        return (rate,)

    def _constants(self) -> tuple[float, ...]:
        """Return the numbers that the kernel needs after `_numbers`."""
        return ()

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        """Update a piece of the value and of the slots, vectors of one dtype.

        ``rest`` are the slots, a scratch vector, and `_numbers`. ``value`` may be the
        same memory as ``grad``, which must not be changed, so it is changed last.
        """
        raise NotImplementedError

    def initialize(self, var_list: Variables) -> None:
        """Remember the variables for calls without a list, and make their slots.

        `get_slot` and `variables` return them from the first update on. Slots of other
        variables are made at their first update.

        Raises:
            TypeError, InvalidArgumentError: As `check_variables`.
        """
        super().initialize(var_list)
        states = [
            self._state(variable)
            for variable in self._variables or []
            if is_float(variable.dtype)
        ]
        if any(state.on_device for state in states):
            # The first update may be on another stream.
            cupy().cuda.get_current_stream().synchronize()

    @traced("update")
    def apply_gradients(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> None:
        """Update the variables in place; the gradients are not changed.

        Args:
            grads_and_vars: Pairs (gradient or None, Variable); a variable with None is
                not changed.
            global_step: An integer Variable of shape (), increased by 1.
            name: Ignored.

        Raises:
            TypeError, InvalidArgumentError: As `check_pairs` and
                `check_global_step`, or for an invalid result of the learning rate's
                callable; before any change.
        """
        given = [
            (check_gradient(grad, variable), variable)
            for grad, variable in as_pairs(grads_and_vars)
            if grad is not None
        ]
        check_global_step(global_step)
        self._apply_at(None, given)
        if global_step is not None:
            global_step.value[...] += 1

    def _apply_at(self, rate: float | None, given: Given) -> None:
        """Update variables at a learning rate; by default, the rule's own."""
        if rate is None:
            rate = self._rate.at(lambda: self._updates(given))
        updates = [(grad, self._state(var)) for grad, var in given]
        on_device: Any = [update for update in updates if update[1].on_device]
        if len(on_device) < len(updates):
            on_host = [update for update in updates if not update[1].on_device]
            # No warning: an overflow shows up as inf in the variable.
            with np.errstate(all="ignore"):
                for grad, (_, state) in zip(_ready(on_host), on_host, strict=True):
                    self._apply(grad, state, rate)
        if on_device:
            grads, states = zip(*on_device, strict=True)
            numbers, constants = self._numbers, self._constants()
            plan = self._on_device(self._kernel, states)
            plan.update(grads, lambda step: (*numbers(rate, step), *constants))

    def _apply(self, grad: Array | Rows, state: State, rate: float) -> None:
        step, value = state.count(), state.variable.value
        if value.size == 0:
            return
        numbers = self._numbers(rate, step)
        slots = [slot.value for slot in state.slots.values()]
        scratch = self._scratch.piece(accumulation_dtype(value.dtype))
        if isinstance(grad, Rows):
            update_rows(grad, [value, *slots], scratch, self._update, numbers)
        else:
            update_array([value, grad, *slots], scratch, self._update, numbers)

    @property
    def elementwise(self) -> bool:
        """Whether elements are independent; not if `apply_gradients` is overridden."""
        return type(self).apply_gradients is Rule.apply_gradients

    def _needs_for_rows(self) -> str | None:
        return None if self.elementwise else super()._needs_for_rows()

    def _fragment(self, variables: Sequence[Variable]) -> Optimizer:
        return self if self.elementwise else super()._fragment(variables)

    def _updates(self, pairs: Given) -> int:
        """Return the largest number of earlier updates of these variables."""
        states = [self._states.get(variable) for _, variable in pairs]
        return max(state.updates if state else 0 for state in states)

    def _state(self, variable: Variable, slots: Slots | None = None) -> State:
        """Return the state of a variable; at first, make it, with these slots."""
        state = self._states.get(variable)
        if state is None:
            new = State(variable, self._name, self._slots() if slots is None else slots)
            # Another thread may have made it meanwhile.
            state = self._states.setdefault(variable, new)
        return state

    def _visible(self) -> list[State]:
        return [state for state in self._states.copy().values() if state.updates]

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return the slot ``name`` of ``var``; None before its first update."""
        state = self._states.get(var)
        return state.slots.get(name) if state is not None and state.updates else None

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots, sorted."""
        return sorted(self._slots())

    def variables(self) -> list[Variable]:
        """Return the slots of all updated variables; for Adam, their steps too.

        In the order in which they were made, by `initialize` or by a first update.
        """
        return [
            variable
            for state in self._visible()
            for variable in (*state.slots.values(), *[state.step] * self._counts)
        ]

    def _kept_state(self, var_list: Variables | None) -> KeptState:
        updated = [state.variable for state in self._visible()]
        if var_list is None and updated:
            # Also those that were only given to `apply_gradients`.
            var_list = list(dict.fromkeys([*(self._variables or ()), *updated]))
        return _KeptByRule(self, self._given_or_known(var_list))


class _KeptByRule(KeptState):
    """The slots and counts of variables; made if there are none yet."""

    _optimizer: Rule

    def parts(self) -> dict[Key, Variable]:
        return {
            (var.name, name): part
            for var in self.variables
            if is_float(var.dtype)
            for name, part in self._optimizer._state(var).parts().items()
        }

    def check(self, snapshot: Any) -> None:
        super().check(snapshot)
        rule = self._optimizer
        for var in self.variables:
            found = snapshot["state"].get(var.name, {})
            wanted = {*rule.get_slot_names(), COUNT} if is_float(var.dtype) else set()
            if set(found) != wanted:
                raise InvalidArgumentError(
                    f"the snapshot was made with another optimizer: of {var.name!r} it "
                    f"has {sorted(found)}, and {rule.get_name()} keeps {sorted(wanted)}"
                )
            dtype = accumulation_dtype(var.dtype)
            like = np.broadcast_to(np.empty((), dtype), var.shape)
            if wanted and step_number(found[COUNT], COUNT) < 0:
                raise InvalidArgumentError(
                    f"{var.name!r} has {found[COUNT]} updates in the snapshot"
                )
            for part in wanted - {COUNT}:
                check_array(f"slot {part!r} of {var.name!r}", found[part], like)

    def forget(self) -> None:
        for variable in self.variables:
            self._optimizer._states.pop(variable, None)
        # Its launches update the states that it has dropped.
        self.release()

    def release(self) -> None:
        self._optimizer._on_device.clear()


def _ready(updates: Sequence[tuple[Gradient, State]]) -> Sequence[Array | Rows]:
    """Return gradients that earlier updates do not change."""
    grads = [
        rows_of(grad, accumulation_dtype(state.variable.dtype))
        if isinstance(grad, IndexedSlices)
        else grad
        for grad, state in updates
    ]
    if len(grads) == 1 and not isinstance(grads[0], Rows):
        return grads
    return apart(grads, [state.variable.value for _, state in updates])


# Elements: small enough for the cache, large enough that calling NumPy costs little.
# Measured with 1 MiB of L2: best of 2**13 to 2**16, all rules, 1 to 64 MiB.
PIECE = 1 << 16


class Scratch(threading.local):
    """Working memory of a piece, for each thread and dtype."""

    def __init__(self) -> None:
        self._pieces: dict[np.dtype[Any], Array] = {}

    def piece(self, dtype: np.dtype[Any]) -> Array:
        """Return the vector of a dtype."""
        if dtype not in self._pieces:
            self._pieces[dtype] = np.empty(PIECE, dtype)
        return self._pieces[dtype]


def update_array(
    arrays: Sequence[Array],
    scratch: Array,
    update: Update,
    numbers: Sequence[float],
) -> None:
    """Update the value and the slots of a variable of any strides and order."""
    access: Any = [["readwrite", "overlap_assume_elementwise"] for _ in arrays]
    access[1][0] = "readonly"
    # Views where that is possible, otherwise buffers, which are written back.
    with np.nditer(
        arrays,
        ["external_loop", "buffered", "copy_if_overlap"],
        access,
        [scratch.dtype] * len(access),
        casting="same_kind",
        buffersize=PIECE,
    ) as pieces:
        for piece, *others in pieces:
            update(piece, *others, scratch[: piece.size], *numbers)


def update_rows(
    rows: Rows,
    arrays: Sequence[Array],
    scratch: Array,
    update: Update,
    numbers: Sequence[float],
) -> None:
    """Update some rows of the value and of the slots of a variable."""
    # Pieces have several rows, or one row if that is longer than `scratch`.
    width, dtype = rows.values.shape[1], scratch.dtype
    if width > scratch.size:
        scratch = np.empty(width, dtype)
    step = scratch.size // max(1, width)
    for start in range(0, rows.indices.size, step):
        places = rows.indices[start : start + step]
        grad = rows.values[start : start + step].reshape(-1)
        pieces = [array[places].astype(dtype, copy=False) for array in arrays]
        value, *slots = [piece.reshape(-1) for piece in pieces]
        update(value, grad, *slots, scratch[: grad.size], *numbers)
        for array, piece in zip(arrays, [value, *slots], strict=True):
            array[places] = piece.reshape(len(places), *array.shape[1:])


# Updates on a server


class FlatRule:
    """The updates of a `Rule`, for a server that divides them among ranks."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        # Names to initial values.
        self.slots: Mapping[str, float] = rule._slots()
        # `apply` updates single variables, at the host's learning rate if given;
        # `update` updates a piece of all.
        self.apply, self.update = rule._apply_at, rule._update
        # On the rank that counts updates.
        self._states: Sequence[State] = ()

    def set_variables(
        self, variables: Sequence[Variable], slots: Mapping[str, Mapping[str, Array]]
    ) -> None:
        """Let the rule keep its slots in given arrays."""
        self._states = [
            self._rule._state(var, {slot: slots[slot][var.name] for slot in slots})
            for var in variables
        ]

    def move_slots(self) -> None:
        """Move the slots to memory of their own, before the arrays are freed."""
        for state in self._states:
            state.move_slots()

    def numbers(self) -> tuple[float, ...] | None:
        """Return the numbers of the next update; None if they differ by variable."""
        earlier = {state.counter[()] for state in self._states}
        if len(earlier) != 1:
            return None
        step = earlier.pop()
        return self._rule._numbers(self._rule._rate.at(lambda: step), step + 1)

    def rate(self) -> float | None:
        """Return the learning rate now; None if it depends on the updates so far."""
        rate = self._rule._rate
        return None if rate.takes_step else rate.at(lambda: 0)

    def count(self) -> None:
        """Count an update of all variables; the first makes their state visible."""
        for state in self._states:
            state.counter[()] += 1


# Learning rates

_RATE = "learning_rate"


def checked_number(value: Any, name: str, low: float, high: float = math.inf) -> float:
    """Return a finite number in [low, high)."""
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not low <= value < high:
        raise InvalidArgumentError(
            f"{name} must be a number {_span(low, high)}, got {value!r}"
        )
    return float(value)


def _span(low: float, high: float) -> str:
    if high < math.inf:
        return f"of at least {low:g} and less than {high:g}"
    return f"of at least {low:g}" if low > -math.inf else "that is finite"


def finite(rate: object) -> float | None:
    """Return a learning rate if it is a finite number; None if it is anything else."""
    # The common case first, as this is called in each step.
    if type(rate) is float or isinstance(rate, numbers.Real):
        return float(rate) if math.isfinite(rate) else None
    return None


class RateOfStep:
    """A checked learning rate: a number, or the result of a callable."""

    def __init__(self, rate: Any) -> None:
        self.given, self.takes_step = rate, False
        if callable(rate):
            self.takes_step = _takes_step(rate)
        else:
            self.given = checked_number(rate, _RATE, 0)

    def at(self, step: Callable[[], int]) -> float:
        """Return the rate of an update; ``step`` returns the number of earlier ones."""
        if not callable(self.given):
            return self.given  # type: ignore[no-any-return]
        rate = self.given(step()) if self.takes_step else self.given()
        return checked_number(rate, _RATE, 0)


def _takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable requires an argument; an optional one is left out."""
    try:
        signature = inspect.signature(rate)
    except (TypeError, ValueError):
        return False
    for arguments in ((), (0,)):
        with contextlib.suppress(TypeError):
            signature.bind(*arguments)
            return bool(arguments)
    raise InvalidArgumentError(
        f"{_RATE} must be a number, or a callable without arguments or with one, the "
        f"step; got a callable of {signature}"
    )
