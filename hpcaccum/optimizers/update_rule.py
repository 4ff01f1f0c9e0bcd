"""What all update rules have in common: state, pieces, checks.

A rule changes arrays in place, in pieces that stay in the cache while it passes over
them several times. Half precision is computed in float32, and so is its state.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from hpcaccum.device import cupy, is_device, kernels
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.base import (
    Array,
    Optimizer,
    check_global_step,
    check_pairs,
    count_step,
)
from hpcaccum.optimizers.variable import Variable
from hpcaccum.overlap import crossing, overlap

_RATE = "learning_rate"

# Elements: small enough for the cache, large enough that calling NumPy costs little.
# Measured with 1 MiB of L2: best of 2**13 to 2**16, all rules, 1 to 64 MiB.
PIECE = 1 << 16

Rate = float | Callable[[], float] | Callable[[int], float]


def checked_number(value: Any, name: str, low: float, high: float = math.inf) -> float:
    """Return a finite number in [low, high).

    Raises:
        InvalidArgumentError: If it is not.
    """
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


class _RateOfStep:
    """A learning rate, checked: a number, or what a callable returns.

    Raises:
        InvalidArgumentError: If it is no number in range, nor a callable without
            arguments or with one.
    """

    def __init__(self, rate: Any) -> None:
        self.given, self.takes_step = rate, False
        if callable(rate):
            self.takes_step = _takes_step(rate)
        else:
            self.given = checked_number(rate, _RATE, 0)

    def at(self, step: Callable[[], int]) -> float:
        """Return the rate of an update; ``step`` says how many came before."""
        if not callable(self.given):
            return self.given  # type: ignore[no-any-return]
        rate = self.given(step()) if self.takes_step else self.given()
        return checked_number(rate, _RATE, 0)


def _takes_step(rate: Callable[..., Any]) -> bool:
    """Whether a callable needs an argument; a default of its own is not replaced."""
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


class _Scratch(threading.local):
    """A piece of working memory for each thread and dtype."""

    def __init__(self) -> None:
        self._pieces: dict[np.dtype[Any], Array] = {}

    def piece(self, dtype: np.dtype[Any]) -> Array:
        if dtype not in self._pieces:
            self._pieces[dtype] = np.empty(PIECE, dtype)
        return self._pieces[dtype]


class _State:
    """What a rule remembers about one variable."""

    def __init__(self, variable: Variable, rule: Rule) -> None:
        dtype = accumulation_dtype(variable.dtype)
        title = f"{variable.name}/{rule.get_name()}"
        self.slots: dict[str, Variable] = {}
        for name, start in rule._slots().items():
            array = _filled(variable.value, start, dtype)
            self.slots[name] = Variable(array, f"{title}/{name}", trainable=False)
        # How many updates there were; for a learning rate that depends on it.
        self.updates = 0
        self.step: Variable | None = None
        if rule._counts:
            zero = np.zeros((), np.int64)
            self.step = Variable(zero, f"{title}/step", trainable=False)

    def variables(self) -> list[Variable]:
        slots = list(self.slots.values())
        return slots if self.step is None else [*slots, self.step]


class Rule(Optimizer):
    """An optimizer that changes each variable by its own gradient, on this rank.

    Nothing is shared between variables: two threads may apply gradients to different
    variables at the same time. The slots of half-precision variables are float32.

    Only the learning rate can be changed later. To set another attribute is an
    AttributeError, so that a misspelt one is found.

    Args:
        learning_rate: A number of at least 0; or a callable that returns one and is
            called at each `apply_gradients`: without arguments or, if it needs one,
            with the number of updates so far (of the variable that had most).
        name: Part of the names of its state.

    Raises:
        InvalidArgumentError: If an argument is no number or out of its range.
    """

    __slots__ = ("_lock", "_rate", "_scratch", "_states")

    # Whether the update depends on how many came before.
    _counts: ClassVar[bool] = False
    # The CUDA kernel that does the same, of kernels/update.cu.
    _kernel: str

    def __init__(self, learning_rate: Rate, name: str) -> None:
        super().__init__(name)
        self._rate = _RateOfStep(learning_rate)
        self._states: dict[Variable, _State] = {}
        self._lock = threading.Lock()
        self._scratch = _Scratch()

    @property
    def learning_rate(self) -> Rate:
        """The number or callable that was given; may be set, at any time and thread.

        The next update uses it. It is checked as the constructor does.
        """
        return self._rate.given  # type: ignore[no-any-return]

    @learning_rate.setter
    def learning_rate(self, rate: Rate) -> None:
        self._rate = _RateOfStep(rate)

    def __repr__(self) -> str:
        """Show the options; the same on ranks that were given the same ones."""
        rate = "callable" if callable(self.learning_rate) else self.learning_rate
        options = {"learning_rate": rate, **self._options(), "name": self._name}
        text = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"{type(self).__name__}({text})"

    def _options(self) -> dict[str, Any]:
        """Return the arguments besides learning rate and name."""
        return {}

    def _slots(self) -> dict[str, float]:
        """Return the names of the slots and what they are filled with at first."""
        return {}

    def _numbers(self, rate: float, step: int) -> tuple[float, ...]:
        """Return what one update needs besides arrays; ``step`` counts from 1."""
        return (rate,)

    def _constants(self) -> tuple[float, ...]:
        """Return what the kernel needs besides `_numbers`."""
        return ()

    def _update(self, value: Array, grad: Array, *rest: Any) -> None:
        """Change a piece of the value and of the slots, vectors of one dtype.

        Args:
            value: It may be the same memory as the gradient, so it is changed last.
            grad: Not to be changed.
            rest: The slots, a scratch vector, and `_numbers`.
        """
        raise NotImplementedError

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> None:
        """Change the variables in place; never the gradients.

        Args:
            grads_and_vars: Pairs (gradient or None, Variable); a variable with None is
                left alone.
            global_step: An integer Variable of shape (), increased by 1.
            name: Ignored.

        Raises:
            TypeError, InvalidArgumentError: As `check_pairs` and
                `check_global_step`, or for what the learning rate's callable returns;
                before anything is changed.
        """
        pairs = check_pairs(grads_and_vars)
        check_global_step(global_step)
        given = _detached([(g, v) for g, v in pairs if g is not None])
        rate = self._rate.at(lambda: self._updates(given))
        states = [self._state(variable) for _, variable in given]
        for (grad, variable), state in zip(given, states, strict=True):
            self._apply(variable, grad, state, rate)
        count_step(global_step)

    def _apply(
        self, variable: Variable, grad: Array, state: _State, rate: float
    ) -> None:
        step = 0
        state.updates += 1
        if state.step is not None:
            count_step(state.step)
            step = int(state.step.value)
        if variable.value.size == 0:
            return
        numbers_ = self._numbers(rate, step)
        slots = [slot.value for slot in state.slots.values()]
        if is_device(variable.value):
            constants = (*numbers_, *self._constants())
            _launch(self._kernel, variable.value, grad, slots, constants)
            return
        dtype = accumulation_dtype(variable.dtype)
        scratch = self._scratch.piece(dtype)
        with _pieces([variable.value, grad, *slots], dtype) as pieces:
            for value, *others in pieces:
                self._update(value, *others, scratch[: value.size], *numbers_)

    def _updates(self, pairs: list[tuple[Array, Variable]]) -> int:
        """Return how many updates the variable has had that had most."""
        states = [self._states.get(variable) for _, variable in pairs]
        return max(state.updates if state else 0 for state in states)

    def _state(self, variable: Variable) -> _State:
        state = self._states.get(variable)
        if state is None:
            with self._lock:
                state = self._states.setdefault(variable, _State(variable, self))
        return state

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return the slot ``name`` of ``var``; None before its first update."""
        state = self._states.get(var)
        return None if state is None else state.slots.get(name)

    def get_slot_names(self) -> list[str]:
        """Return the names of the slots, sorted."""
        return sorted(self._slots())

    def variables(self) -> list[Variable]:
        """Return the slots, and steps where they matter, of all updated variables."""
        with self._lock:
            states = list(self._states.values())
        return [variable for state in states for variable in state.variables()]


def _launch(
    kernel: str,
    value: Any,
    grad: Any,
    slots: list[Any],
    numbers_: tuple[float, ...],
) -> None:
    """Change a value and slots on the device, in one pass; queued, not waited for."""
    wide = accumulation_dtype(value.dtype).type
    launch = kernels.kernel(f"{kernel}_{kernels.SUFFIXES[value.dtype]}")
    grad = grad.astype(wide, copy=False)
    scalars = (np.int64(value.size), *map(wide, numbers_))
    launch(*kernels.streaming(value.size), (value, grad, *slots, *scalars))


def _pieces(arrays: list[Array], dtype: np.dtype[Any]) -> Any:
    """Iterate over pieces of all arrays at once: vectors of ``dtype``.

    They are views where that is possible, otherwise buffers; all but the second, the
    gradient, are written back. Any strides and any memory order will do.
    """
    access: Any = [["readwrite", "overlap_assume_elementwise"] for _ in arrays]
    access[1][0] = "readonly"
    return np.nditer(
        arrays,
        ["external_loop", "buffered", "copy_if_overlap"],
        access,
        [dtype] * len(arrays),
        casting="same_kind",
        buffersize=PIECE,
    )


def _detached(pairs: list[tuple[Array, Variable]]) -> list[tuple[Array, Variable]]:
    """Copy the gradients that lie in the memory of a variable that changes earlier.

    The gradient of ``x * y`` by ``y`` is ``x``.
    """
    if len(pairs) == 1:
        return pairs
    grads = [grad for grad, _ in pairs]
    suspect = crossing(grads, [variable.value for _, variable in pairs])
    return [
        (_safe(grad, pairs[:i]) if suspect[i] else grad, variable)
        for i, (grad, variable) in enumerate(pairs)
    ]


def _filled(like: Array, number: float, dtype: np.dtype[Any]) -> Array:
    if is_device(like):
        return cupy().full(like.shape, number, dtype)  # type: ignore[no-any-return]
    return np.full_like(like, number, dtype, subok=False)


def _safe(grad: Array, earlier: list[tuple[Array, Variable]]) -> Array:
    shared = any(overlap(grad, variable.value) for _, variable in earlier)
    return grad.copy() if shared else grad
