"""Variables, the interface that all optimizers share, and the checks behind it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcaccum.arguments import gradient_array
from hpcaccum.device import is_device, library
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.variable import Variable, is_float, is_integer

Array = np.ndarray[Any, Any]
Loss = Callable[[], tuple[Any, Any]]


class Exchange(enum.Enum):
    """How an optimizer exchanges gradients with other ranks."""

    LOCAL = "local"
    COLLECTIVE = "collective"
    ONE_SIDED = "one-sided"


def check_variables(var_list: Any) -> list[Variable]:
    """Return a list of variables, or raise.

    Raises:
        TypeError: If it is no list, or something in it is no Variable.
        InvalidArgumentError: If it is None or empty, or two have one name.
    """
    if var_list is None:
        raise InvalidArgumentError(
            "no variables are known: pass var_list, or call initialize(var_list) first"
        )
    if isinstance(var_list, (str, bytes, Variable)) or not isinstance(
        var_list, Iterable
    ):
        raise TypeError(f"var_list must be a list of Variables, got {var_list!r}")
    variables = list(var_list)
    for number, variable in enumerate(variables):
        if not isinstance(variable, Variable):
            raise TypeError(
                f"var_list must hold Variables, got {type(variable).__name__} "
                f"at index {number}"
            )
    if not variables:
        raise InvalidArgumentError("var_list is empty")
    names = [variable.name for variable in variables]
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise InvalidArgumentError(
            f"{names.count(name)} variables are named {name!r}; give each a name of "
            f"its own"
        )
    return variables


def listed(var_list: Any) -> Any:
    """Return an iterator as a list, so that it can be gone through twice."""
    return list(var_list) if isinstance(var_list, Iterator) else var_list


def check_gradient(grad: Any, variable: Variable) -> Array:
    """Return a gradient as an array; it is not copied nor converted to another dtype.

    Raises:
        InvalidArgumentError: If it does not fit the variable, or that is of integers.
    """
    value = variable.value
    dtype, shape = value.dtype, value.shape
    if not is_float(dtype):
        raise InvalidArgumentError(
            f"{variable.name!r} is of {dtype} and cannot be trained"
        )
    # The usual case: each gradient comes here several times in a step.
    usual = type(grad) is type(value) is np.ndarray
    if usual and grad.dtype is dtype and grad.shape == shape:
        return grad  # type: ignore[no-any-return]
    try:
        array = gradient_array(grad, dtype)
    except InvalidArgumentError as error:
        text = f"gradient of {variable.name!r}: {error}"
        raise InvalidArgumentError(text) from None
    if type(array) is not type(value) and is_device(array) is not is_device(value):
        where = ["in host memory", "on the device"]
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} is {where[is_device(array)]}, the variable "
            f"is not"
        )
    if array.shape != shape:
        raise InvalidArgumentError(
            f"gradient of {variable.name!r} must have shape {shape}, got {array.shape}"
        )
    return array


def check_pairs(grads_and_vars: Any) -> list[tuple[Array | None, Variable]]:
    """Return gradients and variables as a list of pairs, all checked; change nothing.

    Args:
        grads_and_vars: Pairs; an iterator is used up.

    Raises:
        TypeError: If it is not made of pairs (gradient or None, Variable).
        InvalidArgumentError: If it is empty, has one variable twice or no gradient at
            all, or a gradient does not fit its variable.
    """
    if not isinstance(grads_and_vars, Iterable):
        raise TypeError(
            "grads_and_vars must be a list of pairs (gradient, Variable), "
            f"got {type(grads_and_vars).__name__}"
        )
    pairs = [_pair(item, i) for i, item in enumerate(grads_and_vars)]
    if not pairs:
        raise InvalidArgumentError("no variables provided")
    names = [variable.name for _, variable in pairs]
    if len({variable for _, variable in pairs}) < len(pairs):
        raise InvalidArgumentError(f"a variable is given twice in {names}")
    if all(grad is None for grad, _ in pairs):
        raise InvalidArgumentError(f"no gradients provided for any variable: {names}")
    return [
        (None if grad is None else check_gradient(grad, variable), variable)
        for grad, variable in pairs
    ]


def _pair(item: Any, index: int) -> tuple[Any, Variable]:
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(
            "grads_and_vars must hold pairs (gradient, Variable), got "
            f"{type(item).__name__} at index {index}"
        )
    if not isinstance(item[1], Variable):
        raise TypeError(
            "grads_and_vars must hold pairs (gradient, Variable), got "
            f"{type(item[1]).__name__} as the variable at index {index}"
        )
    return item[0], item[1]


def check_global_step(global_step: Any) -> Variable | None:
    """Return ``global_step`` if it is None or one integer.

    Raises:
        TypeError: If it is something else than an integer Variable of shape ().
    """
    if global_step is None:
        return None
    if not isinstance(global_step, Variable):
        raise TypeError(
            "global_step must be an integer Variable of shape (), "
            f"got {type(global_step).__name__}"
        )
    if global_step.shape != () or not is_integer(global_step.dtype):
        raise TypeError(
            "global_step must be an integer Variable of shape (), "
            f"got {global_step.dtype} {global_step.shape}"
        )
    return global_step


def count_step(global_step: Variable | None) -> None:
    """Add 1 to a step that was checked, if there is one."""
    if global_step is not None:
        global_step.value[...] += 1


def set_global_step(global_step: Any, number: int) -> None:
    """Set a step that may be None.

    Raises:
        TypeError: As `check_global_step`.
    """
    checked = check_global_step(global_step)
    if checked is not None:
        checked.value[...] = number


def check_inner(inner: Any, outer: Optimizer) -> None:
    """Raise unless ``outer`` can leave its updates to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        InvalidArgumentError: If it exchanges gradients in a way that cannot happen
            inside of ``outer``.
    """
    own = type(outer).__name__
    if not isinstance(inner, Optimizer):
        raise TypeError(f"{own} needs an optimizer, got {type(inner).__name__}")
    if inner.exchange is Exchange.LOCAL:
        return
    # A rank that drops a gradient around a collective makes MPI average different
    # steps, silently.
    if inner.exchange is not outer.exchange or outer.exchange is Exchange.ONE_SIDED:
        raise InvalidArgumentError(
            f"{own} is {outer.exchange.value} and cannot hold {type(inner).__name__}, "
            f"which is {inner.exchange.value}; give it a local one such as SGD"
        )


class Optimizer(abc.ABC):
    """What every optimizer can do, in the words of TensorFlow 1.

    Args:
        name: Part of the names of its state.
    """

    # Without a dictionary an optimizer refuses attributes that it does not know; a
    # subclass may have all that it wants.
    __slots__ = ("__weakref__", "_gradients", "_name", "_variables")

    GATE_NONE, GATE_OP, GATE_GRAPH = 0, 1, 2

    exchange: ClassVar[Exchange] = Exchange.LOCAL

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name must be a text, got {name!r}")
        self._name = name
        self._variables: list[Variable] | None = None
        self._gradients: dict[str, Array] = {}

    def __repr__(self) -> str:
        """Show the name; the same on all ranks, which compare their optimizers."""
        return f"{type(self).__name__}(name={self._name!r})"

    def initialize(self, var_list: Any) -> None:
        """Say which variables are meant where no list is given.

        Raises:
            TypeError, InvalidArgumentError: As `check_variables`.
        """
        self._variables = check_variables(var_list)

    def gradient_arrays(self) -> dict[str, Array]:
        """Return memory in which a loss can compute its next gradients, by name.

        It is the loss's until `apply_gradients`. Where an optimizer exchanges
        gradients, those that lie there travel without a copy.

        Raises:
            InvalidArgumentError: Before `initialize`.
        """
        for var in check_variables(self._variables):
            if var.name not in self._gradients:
                new = library(var.value).zeros_like(var.value)
                self._gradients[var.name] = new
        return dict(self._gradients)

    def compute_gradients(
        self,
        loss: Loss,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        grad_loss: Any = None,
    ) -> list[tuple[Array | None, Variable]]:
        """Call ``loss`` once and return its gradients with their variables.

        Args:
            loss: Without arguments; returns a value, and gradients in the order of
                ``var_list`` or by name. A gradient may be None, or its name missing.
            var_list: None means the variables given to `initialize`.
            gate_gradients: 0, 1 or 2, without effect.
            aggregation_method: Ignored.
            colocate_gradients_with_ops: Ignored.
            grad_loss: A number that multiplies the gradients.

        Returns:
            Pairs; a gradient is the array that ``loss`` returned unless ``grad_loss``
            is given.

        Raises:
            TypeError: If ``loss`` or what it returns is something else.
            InvalidArgumentError: If there are no variables, or a gradient does not fit.
        """
        check_gate(gate_gradients)
        variables = check_variables(self._variables if var_list is None else var_list)
        if self._variables is None:
            self._remember(variables)
        factor = _grad_loss(grad_loss)
        grads = _call(loss, variables)
        pairs: list[tuple[Array | None, Variable]] = []
        for grad, variable in zip(grads, variables, strict=True):
            array = None if grad is None else check_gradient(grad, variable)
            if array is not None and factor is not None:
                array = scaled(array, factor)
            pairs.append((array, variable))
        return pairs

    @abc.abstractmethod
    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None
    ) -> Any:
        """Change the variables by their gradients."""

    def minimize(
        self,
        loss: Loss,
        global_step: Any = None,
        var_list: Any = None,
        gate_gradients: int = GATE_OP,
        aggregation_method: Any = None,
        colocate_gradients_with_ops: bool = False,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> Any:
        """Compute gradients and apply them; arguments and errors of these two."""
        check_global_step(global_step)
        pairs = self.compute_gradients(
            loss,
            var_list,
            gate_gradients=gate_gradients,
            aggregation_method=aggregation_method,
            colocate_gradients_with_ops=colocate_gradients_with_ops,
            grad_loss=grad_loss,
        )
        return self.apply_gradients(pairs, global_step, name)

    def _remember(self, variables: list[Variable]) -> None:
        """Initialize with the variables of the first `compute_gradients`."""
        self.initialize(variables)

    def _release(self) -> None:  # noqa: B027
        """Free memory that the next update would allocate again."""

    def get_name(self) -> str:
        """Return its name."""
        return self._name

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return the state called ``name`` of ``var``; None if there is none (yet)."""
        return None

    def get_slot_names(self) -> list[str]:
        """Return the names of the state that each variable has."""
        return []

    def variables(self) -> list[Variable]:
        """Return all state there is, in the order in which it was made."""
        return []


def check_gate(gate_gradients: Any) -> None:
    """Raise InvalidArgumentError unless it is GATE_NONE, GATE_OP or GATE_GRAPH."""
    if isinstance(gate_gradients, bool) or gate_gradients not in (0, 1, 2):
        raise InvalidArgumentError(
            "gate_gradients must be GATE_NONE, GATE_OP or GATE_GRAPH (0, 1 or 2), "
            f"got {gate_gradients!r}"
        )


def scaled(grad: Array, factor: float) -> Array:
    """Return a new array, ``factor * grad``, of the dtype of ``grad`` if a float."""
    dtype = grad.dtype if is_float(grad.dtype) else np.dtype(np.float64)
    product = np.multiply(grad, factor, dtype=accumulation_dtype(dtype))
    array: Array = library(grad).asarray(product)
    return array.astype(dtype, copy=False)


def _grad_loss(grad_loss: Any) -> float | None:
    if grad_loss is None:
        return None
    try:
        return float(grad_loss)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"grad_loss must be one number, got {grad_loss!r}"
        ) from None


def _call(loss: Any, variables: list[Variable]) -> list[Any]:
    if not callable(loss):
        raise TypeError(
            "loss must be callable without arguments and return (value, gradients), "
            f"got {type(loss).__name__}"
        )
    result = loss()
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"loss must return (value, gradients), got {type(result).__name__}"
        )
    grads = result[1]
    names = [variable.name for variable in variables]
    if isinstance(grads, Mapping):
        unknown = [name for name in grads if name not in names]
        if unknown:
            raise InvalidArgumentError(
                f"loss returned gradients for {unknown}, the variables are {names}"
            )
        return [grads.get(name) for name in names]
    if not isinstance(grads, (list, tuple)):
        raise TypeError(
            "loss must return gradients as a list or a mapping by name, "
            f"got {type(grads).__name__}"
        )
    if len(grads) != len(names):
        raise InvalidArgumentError(
            f"loss returned {len(grads)} gradients for {len(names)} variables: {names}"
        )
    return list(grads)
