"""DeviceRowAccumulator: gradients of some rows of a matrix, summed on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.device_rounds import AccumulatorOnDevice, DeviceRounds
from hpcaccum.arguments import positive_count, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.device import check_device_array, kernels
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from hpcaccum.accumulator.device_rounds import DeviceReceipt

_SUMMED = (np.dtype(np.float32), np.dtype(np.float64))
# Elements that are as much work for the grid as the row that a warp does.
_ROW = 128
_INT64 = np.dtype(np.int64)


class DeviceRowAccumulator(AccumulatorOnDevice):
    """Accumulates gradients that are rows of a matrix, such as an embedding's.

    As `DeviceAccumulator`, but each row is divided by the number of contributions that
    it had itself, so that rare words are not divided by the number of all gradients.

    Args:
        dtype: float32 or float64, of values and sums.
        shape: Rows and columns of the whole matrix, which is kept in memory.
        name: For messages.

    Raises:
        DeviceUnavailableError: If there is no device.
        InvalidArgumentError, TypeError: For an unusable argument.

    Source: the behaviour of TensorFlow's ``tf.compat.v1.SparseConditionalAccumulator``.
    """

    def __init__(
        self, dtype: Any, shape: tuple[int, int], name: str = "device_row_accumulator"
    ) -> None:
        self._dtype, self._name = float_dtype(dtype), name
        if self._dtype not in _SUMMED:
            raise InvalidArgumentError(
                f"rows are summed in float32 or float64, got {self._dtype}"
            )
        if not isinstance(shape, (list, tuple)) or len(shape) != 2:
            raise InvalidArgumentError(f"shape must be rows and columns, got {shape!r}")
        self._rows, self._width = (positive_count(each, "shape") for each in shape)
        cupy = device.cupy()
        nbytes = self._rows * self._width * self._dtype.itemsize
        self._rounds = DeviceRounds(name, nbytes)
        with self._rounds.turn():
            self._sum: Any = cupy.zeros((self._rows, self._width), self._dtype)
            self._counts: Any = cupy.zeros(self._rows, np.int32)
            self._refused: Any = cupy.zeros(1, np.int64)

    def __repr__(self) -> str:
        """Show the numbers."""
        return (
            f"<DeviceRowAccumulator {self._name!r} {self._dtype} "
            f"{(self._rows, self._width)}: {self._rounds.describe()}>"
        )

    def apply_grad(
        self, indices: Any, values: Any, local_step: Any = 0
    ) -> DeviceReceipt:
        """Add a gradient, unless it is stale; returns before that is done.

        Both arrays are read on the current stream and kept until then, so they may be
        deleted at once.

        Args:
            indices: int64, a vector on the device: rows, in any order, also repeatedly.
                One that is no row is not added, and the take then raises.
            values: Of the accumulator's dtype, contiguous: a row for each index.
            local_step: The step the gradient was computed at; one number.

        Returns:
            Tells what happened, once the device knows.

        Raises:
            InvalidArgumentError: For a wrong shape, dtype, place or step; nothing is
                changed.
        """
        self._rounds.check()
        step = step_number(local_step, "local_step")
        number = len(indices) if device.is_device(indices) and indices.ndim else 0
        check_device_array(f"{self._name}: indices", indices, (number,), (_INT64,))
        wanted = (number, self._width)
        check_device_array(f"{self._name}: values", values, wanted, (self._dtype,))
        return self._rounds.submit(
            step,
            (indices, values),
            lambda met: self._add(indices, values, step, met),
        )

    def _add(self, indices: Any, values: Any, step: int, met: Any) -> None:
        kernels.kernel(f"scatter_add_rows_{kernels.SUFFIXES[self._dtype]}")(
            *_grid(len(indices)),
            (
                self._sum,
                self._counts,
                values,
                indices,
                np.int64(len(indices)),
                np.int64(self._width),
                np.int64(self._rows),
                self._rounds.header,
                np.int64(step),
                met,
                self._refused,
            ),
        )

    def take_grad(
        self, num_required: Any, *, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Wait for ``num_required`` gradients; return the rows they had, and reset.

        The host waits for the device, as it must know how many rows there are.

        Args:
            num_required: At least 1.
            timeout: Seconds; 0 looks once, when the device has done what is queued;
                None waits, with warnings.

        Returns:
            Rows that have contributions, ascending, int64; and for each the mean of its
            contributions. On the device.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is no integer
                of at least 1. Also if some indices were no rows: says how many; the
                next take returns what the others added.
            WaitTimeoutError: Says how many gradients there were. Nothing is lost.
        """
        self._rounds.check()
        required = positive_count(num_required, "num_required")
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        with self._rounds.take(required, deadline):
            self._check_refused()
            return self._reduce()

    def _check_refused(self) -> None:
        if refused := int(self._refused.item()):
            self._refused.fill(0)
            raise InvalidArgumentError(
                f"{self._name}: {refused} of the indices were not in 0 to "
                f"{self._rows - 1} and were not added"
            )

    def _reduce(self) -> tuple[Any, Any]:
        kernels.kernel(f"mean_rows_{kernels.SUFFIXES[self._dtype]}")(
            *_grid(self._rows),
            (
                self._sum,
                self._counts,
                np.int64(self._rows),
                np.int64(self._width),
                self._rounds.header,
            ),
        )
        # Plain CuPy: a gather and a scatter move no byte more than a kernel would.
        rows = device.cupy().flatnonzero(self._counts)
        means = self._sum[rows]
        self._sum[rows] = 0
        self._counts.fill(0)
        return rows, means

    def free(self) -> None:
        """Give the device's memory back; calling it again does nothing."""
        if self._rounds.free():
            self._sum = self._counts = self._refused = None


def _grid(rows: int) -> Any:
    """Return grid and block of a kernel in which a warp does a row."""
    return kernels.streaming(rows * _ROW)
