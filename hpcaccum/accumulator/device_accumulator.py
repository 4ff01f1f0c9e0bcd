"""DeviceAccumulator: gradients of one process, summed on its device."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import device
from hpcaccum.accumulator.device_rounds import AccumulatorOnDevice, DeviceRounds
from hpcaccum.accumulator.shapes import declared_shape, is_fixed, known
from hpcaccum.arguments import one_of, positive_count, step_number
from hpcaccum.deadline import Deadline
from hpcaccum.device import PointerTable, check_device_array, kernels
from hpcaccum.dtypes import FLOATS, accumulation_dtype, float_dtype
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout

if TYPE_CHECKING:
    from hpcaccum.accumulator.device_rounds import DeviceReceipt
    from hpcaccum.accumulator.shapes import Shape

# The name of an array that has none.
_ONLY = "gradient"


class DeviceAccumulator(AccumulatorOnDevice):
    """Accumulates gradients on the device, if they are not stale. No MPI in it.

    What `ConditionalAccumulator` is to the ranks of a job, this is to the threads and
    streams of one process, or to the micro-batches of one step. Sum, step and counts
    are the current device's. Applying waits for nothing: whether a gradient is stale is
    decided there, when its turn comes.

    Any thread and any stream may apply and take; what is called first comes first. A
    gradient is read on the stream that is current, as results are written: the stream
    that computed it must be waited for. When the call returns it may be deleted,
    whatever stream its memory was allocated on: the accumulator keeps it until the
    device has read it, and gives it up at a later call. Or it may be written again, by
    what is queued on the current stream.

    Args:
        dtype: float16, float32, float64 or bfloat16, of the results. The halves are
            summed in float32.
        shape: Of the gradients; or a mapping of names to shapes: gradients and results
            are then mappings of names to arrays, and all are added in one launch.
        name: For messages.
        reduction_type: ``"MEAN"`` (of all gradients accumulated) or ``"SUM"``.
        clip_norm: If given, a result whose 2-norm, over all its arrays, is greater is
            scaled down to it.

    Raises:
        DeviceUnavailableError: If there is no device.
        InvalidArgumentError, TypeError: For an unusable argument.

    Source: the behaviour of TensorFlow's ``tf.compat.v1.ConditionalAccumulator``.
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
        self._dtype, self._name = float_dtype(dtype), name
        self._named = isinstance(shape, Mapping)
        shapes = dict(shape) if self._named else {_ONLY: shape}
        one_of("reduction_type", reduction_type, ("MEAN", "SUM"))
        self._divide = np.int32(reduction_type == "MEAN")
        self._clip = _positive(clip_norm)
        wide = accumulation_dtype(self._dtype)
        self._layout = Layout({n: _fixed(s) for n, s in shapes.items()}, wide)
        # What the sums hold exactly.
        self._taken = tuple(each for each in FLOATS if each.itemsize <= wide.itemsize)
        self._table = PointerTable(self._layout)
        self._rounds = DeviceRounds(name, self._layout.nbytes)
        with self._rounds.turn():
            # What lies between the arrays is summed for the norm, so it must be 0.
            self._sum: Any = device.cupy().zeros(self._layout.size, wide)
            self._norm = None if self._clip is None else _Norm(self._sum)

    def __repr__(self) -> str:
        """Show the numbers."""
        shapes = self._layout.shapes
        shape = f"{len(shapes)} arrays" if self._named else shapes[_ONLY]
        return (
            f"<DeviceAccumulator {self._name!r} {self._dtype} {shape}: "
            f"{self._rounds.describe()}>"
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of results."""
        return self._dtype

    @property
    def name(self) -> str:
        """The name given at construction."""
        return self._name

    def apply_grad(
        self, grad: Any, local_step: Any = 0, *, scale: float = 1.0
    ) -> DeviceReceipt:
        """Add a gradient, unless it is stale; returns before that is done.

        It is read on the current stream and kept until then, so it may be deleted at
        once.

        Args:
            grad: Contiguous array on the device, or a mapping of all names to such. Of
                float16, bfloat16 or float32; for sums in float64 also of that.
            local_step: The step the gradient was computed at; one number.
            scale: A factor, such as that of a loss scaler.

        Returns:
            Tells what happened, once the device knows.

        Raises:
            InvalidArgumentError: For a wrong shape, dtype, place or step; nothing is
                changed.
        """
        self._rounds.check()
        step = step_number(local_step, "local_step")
        arrays = self._checked("gradient", grad, self._taken)
        factor = self._sum.dtype.type(scale)
        return self._rounds.submit(
            step, arrays, lambda met: self._add(arrays, factor, step, met)
        )

    def _add(self, arrays: dict[str, Any], factor: Any, step: int, met: Any) -> None:
        """Queue the addition of checked arrays."""
        header = self._rounds.header
        # A table of one costs a little more, but knows all dtypes.
        if self._named or accumulation_dtype(arrays[_ONLY].dtype) != self._sum.dtype:
            self._table.accumulate(
                self._sum, arrays, factor, header=header, local_step=step, met=met
            )
            return
        only = arrays[_ONLY]
        size = np.int64(only.size)
        kernels.kernel(f"accumulate_{kernels.SUFFIXES[only.dtype]}")(
            *kernels.streaming(only.size),
            (self._sum, only, factor, size, header, np.int64(step), met),
        )

    def take_grad(
        self, num_required: Any, *, timeout: float | None = None, out: Any = None
    ) -> Any:
        """Wait for ``num_required`` gradients; return their reduction and reset.

        The reduction is over *all* gradients accumulated, which may be more; a mean is
        their sum divided once by their number. Taking moves the accumulator to the
        next step. The host waits until the device has counted enough gradients, not
        for the result: that is queued on the current stream.

        Args:
            num_required: At least 1.
            timeout: Seconds; 0 looks once, when the device has done what is queued;
                None waits, with warnings.
            out: For the result: a contiguous array of the accumulator's dtype and
                shape, or a mapping of all names to such.

        Returns:
            ``out``, else a new array on the device, or a mapping of names to arrays.

        Raises:
            InvalidArgumentError, TypeError: For a ``num_required`` that is no integer
                of at least 1, or an ``out`` that does not fit; nothing is lost.
            WaitTimeoutError: Says how many gradients there were. Nothing is lost.
        """
        self._rounds.check()
        required = positive_count(num_required, "num_required")
        targets = None
        if out is not None:
            targets = self._checked("out", out, (self._dtype,))
        deadline = Deadline(timeout, f"{self._name}: take_grad({required})")
        with self._rounds.take(required, deadline):
            results = self._reduce(targets)
        if out is not None:
            return out
        return results if self._named else results[_ONLY]

    def _reduce(self, targets: dict[str, Any] | None) -> dict[str, Any]:
        """Queue the reduction; return where it will be."""
        cupy, narrow = device.cupy(), self._dtype != self._sum.dtype
        if targets is not None and not narrow and not self._named:
            self._finish(targets[_ONLY])
            return targets
        if targets is None:
            flat = cupy.empty(self._layout.size, self._dtype)
            targets = self._layout.views(flat)
            if not narrow:
                self._finish(flat)
                return targets
        flat = self._sum
        if self._norm is not None:
            # Times NaN, what lies between the arrays would be NaN for ever.
            flat = cupy.empty_like(flat)
        # Else in place: the next gradient overwrites the sum.
        self._finish(flat)
        self._table.unpack(flat, targets)
        return targets

    def _finish(self, flat: Any) -> None:
        """Queue the reduction of the sum to a buffer of the sum's dtype."""
        suffix, size = kernels.SUFFIXES[self._sum.dtype], np.int64(flat.size)
        header = self._rounds.header
        kernel, more = "mean", [header]
        if self._norm is not None:
            kernel = "mean_clip"
            more = [self._norm.square(), header, np.float64(self._clip)]
        kernels.kernel(f"{kernel}_{suffix}")(
            *kernels.streaming(flat.size),
            (flat, self._sum, size, *more, self._divide),
        )

    def free(self) -> None:
        """Give the device's memory back, after waiting for what is queued.

        Calling it again does nothing.
        """
        if self._rounds.free():
            self._sum = self._norm = None
            self._table.clear()

    def _checked(self, what: str, given: Any, dtypes: Any) -> dict[str, Any]:
        """Return arrays by name, in the layout's order, that kernels may be given."""
        if not self._named:
            given = {_ONLY: given}
        elif not isinstance(given, Mapping):
            raise InvalidArgumentError(
                f"{self._name}: {what} must be a mapping of names to arrays, got "
                f"{type(given).__name__}"
            )
        elif given.keys() != self._layout.shapes.keys():
            raise InvalidArgumentError(
                f"{self._name}: {what} must have {self._difference(given)}"
            )
        arrays = {name: given[name] for name in self._layout}
        for name, array in arrays.items():
            told = (
                f"{self._name}: {what} {name!r}"
                if self._named
                else (f"{self._name}: {what}")
            )
            check_device_array(told, array, self._layout.shapes[name], dtypes)
        return arrays

    def _difference(self, given: Mapping[str, Any]) -> str:
        """Say which names are missing, or too many."""
        missing = [name for name in self._layout if name not in given]
        if missing:
            return f"an array {missing[0]!r}"
        extra = next(name for name in given if name not in self._layout.shapes)
        return f"no array {extra!r}"


class _Norm:
    """The squared 2-norm of a buffer, and what the kernel needs to compute it."""

    def __init__(self, flat: Any) -> None:
        cupy = device.cupy()
        self._flat = flat
        self._grid, self._block = kernels.streaming(flat.size)
        self._partial = cupy.empty(self._grid, np.float64)
        self._ticket = cupy.zeros(1, np.int64)
        self._result = cupy.empty(1, np.float64)

    def square(self) -> Any:
        """Queue the computation; return where it will be, on the device."""
        flat, size = self._flat, np.int64(self._flat.size)
        arrays = self._partial, self._ticket, self._result
        kernels.kernel(f"square_norm_{kernels.SUFFIXES[flat.dtype]}")(
            self._grid, self._block, (flat, size, *arrays)
        )
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
