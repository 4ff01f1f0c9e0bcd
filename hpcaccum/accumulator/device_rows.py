"""DeviceRowAccumulator: gradients of some rows of a matrix, summed on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.device_protocol import AccumulatorOnDevice
from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.arguments import positive_count, positive_weight, step_number
from hpcaccum.device import check_device_array, kernels
from hpcaccum.dtypes import float_dtype
from hpcaccum.errors import InvalidArgumentError

_SUMMED = (np.dtype(np.float32), np.dtype(np.float64))
# The kernels index the elements of a row by 32 bits.
_MOST_COLUMNS = 2**32 - 1
_INT64 = np.dtype(np.int64)


class DeviceRowAccumulator(AccumulatorOnDevice):
    """Accumulates gradients of rows of a matrix, such as an embedding's.

    Like `DeviceAccumulator`, but each row is divided by the sum of the weights of its
    own contributions, so that the row of a rare word is not divided by the number of
    all gradients.

    Args:
        dtype: float32 or float64; the dtype of values and sums.
        shape: Rows and columns of the whole matrix, all of which is in device memory.
        name: Name in messages.

    Raises:
        DeviceUnavailableError: If there is no device.
        InvalidArgumentError, TypeError: For an unusable argument.

    Source: the behavior of TensorFlow's ``tf.compat.v1.SparseConditionalAccumulator``.
    """

    def __init__(
        self, dtype: Any, shape: tuple[int, int], name: str = "device_row_accumulator"
    ) -> None:
        self._dtype = float_dtype(dtype)
        if self._dtype not in _SUMMED:
            raise InvalidArgumentError(
                f"rows are summed in float32 or float64, got {self._dtype}"
            )
        if not isinstance(shape, (list, tuple)) or len(shape) != 2:
            raise InvalidArgumentError(f"shape must be rows and columns, got {shape!r}")
        self._rows, self._width = (positive_count(each, "shape") for each in shape)
        if self._width > _MOST_COLUMNS:
            raise InvalidArgumentError(
                f"a row must have at most {_MOST_COLUMNS} columns, got {self._width}"
            )
        cupy = device.cupy()
        self._sum: Any = cupy.zeros((self._rows, self._width), self._dtype)
        self._weights: Any = cupy.zeros(self._rows, self._dtype)
        self._refused: Any = cupy.zeros(1, np.int64)
        super().__init__(name, self._sum.nbytes)

    def __repr__(self) -> str:
        """Show name, dtype, shape, step and count."""
        return (
            f"<DeviceRowAccumulator {self._name!r} {self._dtype} "
            f"{(self._rows, self._width)}: {self._numbers()}>"
        )

    def apply_grad(
        self, indices: Any, values: Any, local_step: Any = 0, *, weight: float = 1.0
    ) -> Receipt:
        """Add a gradient, unless it is stale; returns before that is done.

        Both arrays are read on the current stream and kept until then, so they may be
        deleted at once.

        Args:
            indices: Vector of int64 on the device: the rows, in any order, also
                repeatedly. An index out of range is not added; the take then raises.
            values: A row for each index; contiguous, of the accumulator's dtype.
            local_step: The step the gradient was computed at; one number.
            weight: What each of its rows counts; see `DeviceAccumulator.apply_grad`.

        Returns:
            Whether it was accepted, and at which step.

        Raises:
            InvalidArgumentError: For a wrong shape, dtype, device, step or weight.
                Nothing has changed then.
        """
        self._check_open()
        step = step_number(local_step, "local_step")
        factor = positive_weight(weight, self._dtype)
        number = len(indices) if device.is_device(indices) and indices.ndim else 0
        check_device_array(f"{self._name}: indices", indices, (number,), (_INT64,))
        wanted = (number, self._width)
        check_device_array(f"{self._name}: values", values, wanted, (self._dtype,))
        return self._submit(step, factor, (indices, values), factor)

    def _add(self, arrays: tuple[Any, Any], factor: float, first: bool) -> None:
        indices, values = arrays
        sizes = (len(indices), self._width, self._rows)
        self._launch(
            "scatter_add_rows",
            len(indices),
            *(self._sum, self._weights, values, indices),
            *map(np.int64, sizes),
            *(self._dtype.type(factor), self._refused),
        )

    def take_grad(
        self, num_required: Any, *, timeout: float | None = None
    ) -> tuple[Any, Any]:
        """Wait for ``num_required`` gradients; return their rows and reset.

        The call waits for the device too, as the host needs the number of rows.

        Args:
            num_required: At least 1.
            timeout: Seconds to wait for gradients; 0 checks once; None waits without
                limit and logs warnings.

        Returns:
            Rows that have contributions, ascending, int64; and for each the mean of its
            contributions. On the device.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is not an
                integer of at least 1. Also if some indices were out of range; states
                how many. The next take returns the sum of the others.
            WaitTimeoutError: If there are too few gradients; states how many. Nothing
                is lost.
        """
        self._check_open()
        return self._take(num_required, timeout)  # type: ignore[no-any-return]

    def _reduce(self, weight: float, targets: None) -> tuple[Any, Any]:
        if refused := int(self._refused.item()):
            self._refused.fill(0)
            raise InvalidArgumentError(
                f"{self._name}: {refused} of the indices were not in 0 to "
                f"{self._rows - 1} and were not added"
            )
        # Plain CuPy: a kernel would move as many bytes as this gather and scatter. All
        # that may fail, such as an allocation, comes before the sum changes.
        rows = device.cupy().flatnonzero(self._weights)
        means, weights = self._sum[rows], self._weights[rows]
        sizes = map(np.int64, means.shape)
        self._launch("mean_rows", len(rows), means, weights, *sizes)
        self._sum[rows] = 0
        self._weights.fill(0)
        self._begin_step()
        return rows, means

    def _launch(self, kernel: str, rows: int, *arguments: Any) -> None:
        """Launch a kernel over the elements of rows."""
        blocks = kernels.blocks(rows * self._width)
        kernels.prepare(kernel, self._dtype, blocks, *arguments)()

    def _clear(self) -> None:
        self._sum = self._weights = self._refused = None
