"""DeviceAccumulator: gradients of one process, summed on its device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.device_protocol import AccumulatorOnDevice
from hpcaccum.accumulator.receipts import Receipt
from hpcaccum.accumulator.settings import Shape, declared_shape, is_fixed, known
from hpcaccum.arguments import REDUCTIONS, one_of, positive_weight, step_number
from hpcaccum.device import PointerTable, check_device_array, kernels
from hpcaccum.dtypes import FLOATS, accumulation_dtype, float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout

# The internal name of the array of an accumulator without names.
_ONLY = "gradient"
# Booleans as kernels take them.
_FLAGS = np.int32(0), np.int32(1)


class DeviceAccumulator(AccumulatorOnDevice):
    """Accumulates gradients on the current device, unless they are stale. Without MPI.

    `ConditionalAccumulator` serves the ranks of a job; this serves the threads and
    streams of one process, or the micro-batches of one step. The sum is on the device.
    Step and counters are in CPU memory, so no call waits for the device, and a stale
    gradient costs no launch.

    Any thread and any stream may apply and take, in the order of the calls. Gradients
    are read, and results written, on the current stream: it must wait for the stream
    that computed a gradient. After the call the gradient may be deleted, whichever
    stream its memory was allocated on: the accumulator keeps it until the device has
    read it, and drops it at a later call. Work that is queued on the current stream may
    overwrite it.

    Args:
        dtype: float16, float32, float64 or bfloat16; the dtype of results. float16 and
            bfloat16 are summed in float32.
        shape: Shape of the gradients; or a mapping of names to shapes. Gradients and
            results are then mappings of names to arrays, added in one launch.
        name: Name in messages.
        reduction_type: ``"MEAN"`` (of all gradients accumulated) or ``"SUM"``.
        clip_norm: If given, results with a greater 2-norm, over all their arrays, are
            scaled down to it.

    Raises:
        DeviceUnavailableError: If there is no device.
        InvalidArgumentError, TypeError: For an unusable argument.

    Source: the behavior of TensorFlow's ``tf.compat.v1.ConditionalAccumulator``.
    """

    def __init__(
        self,
        dtype: Any,
        shape: Any,
        name: str = "device_accumulator",
        reduction_type: str = "MEAN",
        *,
        clip_norm: float | None = None,
    ) -> None:
        self._dtype = float_dtype(dtype)
        self._named = isinstance(shape, Mapping)
        shapes = dict(shape) if self._named else {_ONLY: shape}
        one_of("reduction_type", reduction_type, REDUCTIONS)
        self._mean = reduction_type == "MEAN"
        self._clip = _positive(clip_norm)
        wide = accumulation_dtype(self._dtype)
        self._layout = Layout({n: _fixed(s) for n, s in shapes.items()}, wide)
        # The dtypes whose values a sum represents exactly.
        self._exact = tuple(each for each in FLOATS if each.itemsize <= wide.itemsize)
        self._table = PointerTable(self._layout)
        # The norm includes the gaps between the arrays, so they must be 0.
        self._sum: Any = device.cupy().zeros(self._layout.size, wide)
        self._norm = None if self._clip is None else _Norm(self._sum)
        # Those of a gradient without a name.
        size = math.prod(self._layout.shapes.get(_ONLY, ()))
        self._size, self._blocks = np.int64(size), kernels.blocks(size)
        super().__init__(name, self._layout.nbytes)

    def __repr__(self) -> str:
        """Show name, dtype, shape, step and count."""
        shapes = self._layout.shapes
        shape = f"{len(shapes)} arrays" if self._named else shapes[_ONLY]
        return (
            f"<DeviceAccumulator {self._name!r} {self._dtype} {shape}: "
            f"{self._numbers()}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of results."""
        return self._dtype

    def apply_grad(
        self,
        grad: Any,
        local_step: Any = 0,
        *,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> Receipt:
        """Add a gradient, unless it is stale; returns before that is done.

        It is read on the current stream and kept until then, so it may be deleted at
        once.

        Args:
            grad: Contiguous array on the device, or a mapping of all names to such
                arrays. Of float16, bfloat16 or float32; of float64 if that is the dtype
                of results.
            local_step: The step the gradient was computed at; one number.
            scale: A factor, such as that of a loss scaler.
            weight: What it counts in the reduction, such as the number of samples in
                its batch: another factor, of which a mean is divided by the sum.

        Returns:
            Whether it was accepted, and at which step.

        Raises:
            InvalidArgumentError: For a wrong shape, dtype, device or step, or a weight
                that is not a finite number above 0. Nothing has changed then.
        """
        self._check_open()
        step = step_number(local_step, "local_step")
        arrays = self._checked("gradient", grad, self._exact)
        number = positive_weight(weight, self._sum.dtype)
        factor = self._sum.dtype.type(scale * number)
        return self._submit(step, number, arrays, factor)

    def _add(self, arrays: dict[str, Any], factor: Any, first: bool) -> None:
        only = None if self._named else arrays[_ONLY]
        # A table of one array costs a little more, but converts from all dtypes.
        if only is None or accumulation_dtype(only.dtype) != self._sum.dtype:
            self._table.addition(self._sum, arrays, factor, first=first)()
            return
        more = self._sum, only, factor, self._size, _FLAGS[first]
        kernels.prepare("accumulate", only.dtype, self._blocks, *more)()

    def take_grad(
        self, num_required: Any, *, timeout: float | None = None, out: Any = None
    ) -> Any:
        """Wait for ``num_required`` gradients; return their reduction and reset.

        The reduction is over *all* gradients accumulated, which may be more. A sum is
        that of the gradients times their weights; a mean is this sum divided once by
        the sum of the weights. Taking moves the accumulator to the next step. The call
        waits for gradients of other threads, never for the device: the result is queued
        on the current stream.

        Args:
            num_required: At least 1.
            timeout: Seconds to wait; 0 checks once; None waits without limit and logs
                warnings.
            out: Where to store the result: a contiguous array of the accumulator's
                dtype and shape, or a mapping of all names to such arrays.

        Returns:
            ``out``, else a new array on the device, or a mapping of names to arrays.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is not an
                integer of at least 1, or an unsuitable ``out``. Nothing is lost.
            WaitTimeoutError: If there are too few gradients; states how many. Nothing
                is lost.
        """
        self._check_open()
        targets = None if out is None else self._checked("out", out, (self._dtype,))
        results = self._take(num_required, timeout, targets)
        if out is not None:
            return out
        return results if self._named else results[_ONLY]

    def _reduce(self, weight: float, targets: dict[str, Any] | None) -> dict[str, Any]:
        cupy, flat, divisor = device.cupy(), None, weight if self._mean else 1.0
        if targets is None:
            flat = cupy.empty(self._layout.size, self._dtype)
            targets = self._layout.views(flat)
        elif not self._named:
            flat = targets[_ONLY]
        if flat is not None and self._dtype == self._sum.dtype:
            self._finish(flat, divisor)
            self._begin_step()
            return targets
        # In place where possible: the next gradient overwrites the sum. Not if norms
        # are computed: NaN in the gaps between the arrays would stay.
        flat = self._sum if self._norm is None else cupy.empty_like(self._sum)
        unpack = self._table.unpacking(flat, targets)
        self._finish(flat, divisor)
        self._begin_step()
        unpack()
        return targets

    def _finish(self, flat: Any, divisor: float) -> None:
        """Queue the reduction of the sum into a buffer of the sum's dtype."""
        kernel, more = "mean", []
        if self._norm is not None:
            kernel, more = "mean_clip", [self._norm.square(), np.float64(self._clip)]
        sizes = np.int64(flat.size), np.float64(divisor)
        blocks, arrays = kernels.blocks(flat.size), (flat, self._sum)
        kernels.prepare(kernel, flat.dtype, blocks, *arrays, *sizes, *more)()

    def _clear(self) -> None:
        self._sum = self._norm = None
        self._table.clear()

    def _checked(self, what: str, given: Any, dtypes: Any) -> dict[str, Any]:
        """Return checked arrays by name, in the layout's order."""
        text = f"{self._name}: {what}"
        if not self._named:
            check_device_array(text, given, self._layout.shapes[_ONLY], dtypes)
            return {_ONLY: given}
        if not isinstance(given, Mapping):
            raise InvalidArgumentError(
                f"{text} must be a mapping of names to arrays, got "
                f"{type(given).__name__}"
            )
        if given.keys() != self._layout.shapes.keys():
            lacks = [f"an array {name!r}" for name in self._layout if name not in given]
            extra = [f"no array {name!r}" for name in given if name not in self._layout]
            raise InvalidArgumentError(f"{text} must have {[*lacks, *extra][0]}")
        for name, shape in self._layout.shapes.items():
            check_device_array(f"{text} {name!r}", given[name], shape, dtypes)
        return {name: given[name] for name in self._layout}


class _Norm:
    """The squared 2-norm of a buffer, and the memory that its kernel needs."""

    def __init__(self, flat: Any) -> None:
        cupy = device.cupy()
        self._flat = flat
        self._blocks = kernels.blocks(flat.size)
        self._partial = cupy.empty(self._blocks, np.float64)
        self._ticket = cupy.zeros(1, np.int64)
        self._result = cupy.empty(1, np.float64)

    def square(self) -> Any:
        """Queue the computation; return the device array that it writes."""
        flat, size = self._flat, np.int64(self._flat.size)
        arrays = self._partial, self._ticket, self._result
        kernels.prepare("square_norm", flat.dtype, self._blocks, flat, size, *arrays)()
        return self._result


def _fixed(shape: Any) -> Shape:
    declared = declared_shape(shape)
    if not is_fixed(declared):
        raise InvalidArgumentError(
            f"shape of gradients on the device must be known, got {shape!r}"
        )
    return known(declared)


def _positive(clip_norm: Any) -> float | None:
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, numbers.Real):
        raise TypeError(f"clip_norm must be a number, got {clip_norm!r}")
    norm = float(clip_norm)
    if not 0 < norm < math.inf:
        raise InvalidArgumentError(f"clip_norm must be positive, got {clip_norm}")
    return norm
