"""Variable: a named array that optimizers update in place."""

from __future__ import annotations

import numbers
import reprlib
import weakref
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from hpcaccum.arguments import gradient_array, positive_count
from hpcaccum.device import check_array, copyto, is_device, to_host
from hpcaccum.dtypes import FLOATS, Array, check_unmasked
from hpcaccum.errors import InvalidArgumentError

_UNNAMED = "Variable"
# Those that can be a global step and have a name, as long as they exist.
_COUNTERS: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()


class Variable:
    """A named array that optimizers update in place.

    Args:
        array: A writable NumPy array of float16, float32, float64, bfloat16 or
            integers; or a contiguous CuPy array of floats. It is not copied. A number
            or a list becomes a new array.
        name: Identifies the variable; the same on all ranks. A global step that has a
            name is found by it on ranks that do not pass it to their optimizer.
        trainable: Whether `get_variable` registers it with its getter, for AGN.
        sparse: Whether all of its gradients are `IndexedSlices`. Optimizers then
            exchange their rows, and allocate no memory for a whole gradient.
        capacity: Maximum number of different rows in a gradient of a sparse variable;
            all rows by default. Optimizers with a parameter server allocate memory for
            this number of rows; `CrossShardOptimizer` does not, and accepts more.

    Attributes:
        name, trainable, sparse: As given.
        capacity: At most the number of rows; 0 if the variable is not sparse.

    Raises:
        TypeError: If ``array`` has another type, ``name`` is not a string, or
            ``capacity`` is not an integer.
        InvalidArgumentError: If the array is read-only or has another dtype; if it is
            sparse and has no rows in CPU memory; or if ``capacity`` is less than 1, or
            given for a variable that is not sparse.
    """

    def __init__(
        self,
        array: ArrayLike,
        name: str = _UNNAMED,
        trainable: bool = True,
        *,
        sparse: bool = False,
        capacity: int | None = None,
    ):
        self.name = check_name(name)
        self.trainable = bool(trainable)
        self.sparse = bool(sparse)
        self._value = _usable(array, name)
        if self.sparse and (is_device(self._value) or not self.shape):
            raise InvalidArgumentError(
                f"value of {name!r}, which is sparse, must be an array in CPU memory "
                f"with rows"
            )
        if capacity is not None and not self.sparse:
            raise InvalidArgumentError(f"capacity of {name!r} needs sparse=True")
        rows = self.shape[0] if self.sparse else 0
        wanted = rows if capacity is None else positive_count(capacity, "capacity")
        self.capacity = min(wanted, rows)
        if not self.shape and is_integer(self.dtype) and name != _UNNAMED:
            _COUNTERS[name] = self

    @property
    def value(self) -> Array:
        """The array itself; an assignment copies values into it."""
        return self._value

    @value.setter
    def value(self, new: ArrayLike) -> None:
        # `w.value -= x` changes the array in place, then assigns it to itself.
        if new is self._value:
            return
        array = gradient_array(new, self.dtype, f"value of {self.name!r}")
        safe = np.can_cast(array.dtype, self.dtype, "same_kind")
        if array.shape != self.shape or not safe:
            raise InvalidArgumentError(
                f"value of {self.name!r} must be {self.dtype} {self.shape}, "
                f"got {array.dtype} {array.shape}"
            )
        copyto(self._value, array)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        shape: tuple[int, ...] = self._value.shape
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the array."""
        dtype: np.dtype[Any] = self._value.dtype
        return dtype

    def _move_to(self, array: Array) -> None:
        """Keep the value in another array from now on, which has it already."""
        self._value = array

    def copy(self) -> Variable:
        """Return a variable of the same name with a copy of the array."""
        value = self._value.copy()
        capacity = self.capacity or None
        return Variable(
            value, self.name, self.trainable, sparse=self.sparse, capacity=capacity
        )

    def __repr__(self) -> str:
        kind = "" if self.trainable else ", trainable=False"
        kind += ", sparse" if self.sparse else ""
        value = to_host(self._value)
        text = np.array2string(value, precision=4, threshold=8, edgeitems=2)
        return f"Variable({self.name!r}, {self.dtype} {self.shape}{kind}, {text})"


def check_name(name: Any) -> str:
    """Return a name; raise TypeError unless it is a string that is not empty."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty string, got {reprlib.repr(name)}")
    return name


def _usable(array: Any, name: str) -> Array:
    if isinstance(array, (numbers.Number, np.generic, list, tuple)):
        try:
            array = np.array(array)
        except ValueError as error:
            raise InvalidArgumentError(f"value of {name!r}: {error}") from None
    if is_device(array):
        check_array(f"value of {name!r}", array, FLOATS)
        return array  # type: ignore[no-any-return]
    if type(array) is not np.ndarray:
        check_unmasked(f"value of {name!r}", array)
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"value of {name!r} must be a NumPy or CuPy array, got "
            f"{type(array).__name__}"
        )
    if not is_float(array.dtype) and not is_integer(array.dtype):
        raise InvalidArgumentError(
            f"value of {name!r} must be of {', '.join(map(str, FLOATS))} or integers, "
            f"got {array.dtype}"
        )
    if not array.flags.writeable:
        raise InvalidArgumentError(f"value of {name!r} is read-only; pass a copy")
    return array


def counter(name: str) -> Variable | None:
    """Return the newest variable of this name that can be a global step."""
    return _COUNTERS.get(name)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether variables of ``dtype`` can be trained."""
    return dtype in FLOATS


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a variable of ``dtype`` can be a global step."""
    return dtype.kind in "iu" and dtype.isnative
