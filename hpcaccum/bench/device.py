"""Kernels, accumulator and exchange of a CUDA device, beside CuPy and a plain copy.

Six tables, all but the last with a plain copy of the same size on the device: a kernel
should need the time in which that copy moves as many bytes. GB/s is the size over the
time, "moved" all bytes that must be read and written over the time, "copy" the share of
the copy's rate, and "vsCuPy" the speedup over the best expression in plain CuPy.

- device sums: one array. ``add``: to a sum in float32; ``mean``: of the sum; ``clip``:
  norm and scaling.
- device arrays: the same bytes in 161 arrays, as ResNet-50 has. ``add``, ``pack`` into
  one flat buffer, ``unpack`` from it; each in one launch.
- device rows: gradients of rows of 128 numbers. ``scatter`` into twice as many rows;
  ``mean rows``: by the number of contributions.
- device updates: ``sgd`` and ``adam`` of one variable.
- device rounds: of a DeviceAccumulator. ``apply`` of one array, ``apply 161``, and
  ``round``, ``round 161``: an apply and a take.
- device exchange: ``exchange``: a reducer, from the device and back to it; ``out`` and
  ``back``: the bytes over the bus, from and to pinned memory; ``host``: the reducer
  alone, in CPU memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import DeviceAccumulator, Layout, Reducer, device
from hpcaccum.bench.device_case import Contest, DeviceCase, DeviceMemory, check_same
from hpcaccum.bench.device_kernels import (
    ArraysOnDevice,
    RowsOnDevice,
    SumsOnDevice,
    elements,
    many_arrays,
)
from hpcaccum.bench.device_updates import UpdatesOnDevice
from hpcaccum.bench.measure import Kind, Memory, check_equal, repeated
from hpcaccum.bench.references import NEVER_STALE, gradient, sum_of_gradients

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum import Group
    from hpcaccum.bench.device_case import Buffers
    from hpcaccum.bench.measure import Case, Conditions


class RoundsOnDevice(DeviceCase):
    """The DeviceAccumulator."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(12)

    def make(self, count: int) -> Buffers:
        """Return gradients and accumulators."""
        cupy, layout, source = device.cupy(), many_arrays(count), self.normal(count)
        return {
            "source": source,
            "target": cupy.empty_like(source),
            "sum": cupy.empty_like(source),
            "out": cupy.empty_like(source),
            "one": DeviceAccumulator("float32", (count,)),
            "arrays": {n: self.normal(s[0]) for n, s in layout.shapes.items()},
            "many": DeviceAccumulator("float32", layout.shapes),
        }

    def spoil(self, buffers: Buffers) -> None:
        """Leave one gradient in each accumulator."""
        for which, given in ("one", "source"), ("many", "arrays"):
            accumulator = buffers[which]
            if accumulator.num_accumulated():
                accumulator.take_grad(1)
            accumulator.apply_grad(buffers[given], NEVER_STALE)
        buffers["out"].fill(np.nan)
        buffers["taken"] = {}

    def compete(self, nbytes: int) -> list[Contest]:
        """Return the contests to measure."""
        moved = 4 * elements(many_arrays(nbytes // 4))
        return [
            Contest("apply", _apply, None, 3 * nbytes, _check_apply),
            Contest("apply 161", _apply_161, None, 3 * moved, _check_apply_161),
            Contest("round", _round, _cupy_round, 4 * nbytes, _check_round),
            Contest("round 161", _round_161, None, 4 * moved, _check_round_161),
        ]

    def free(self) -> None:
        """Free the accumulators."""
        for each in self._sets:
            each["one"].free()
            each["many"].free()
        super().free()


def _apply(b: Buffers) -> None:
    b["one"].apply_grad(b["source"], NEVER_STALE)


def _check_apply(b: Buffers) -> None:
    _check_count(b["one"])
    check_same(b["one"].take_grad(2), b["source"])


def _check_count(accumulator: DeviceAccumulator) -> None:
    """Two gradients were applied: one by `spoil`, one by the benchmark."""
    check_equal(np.array([accumulator.num_accumulated()]), 2)


def _apply_161(b: Buffers) -> None:
    b["many"].apply_grad(b["arrays"], NEVER_STALE)


def _check_apply_161(b: Buffers) -> None:
    _check_count(b["many"])
    b["taken"] = b["many"].take_grad(2)
    _check_round_161(b)


def _round(b: Buffers) -> None:
    _apply(b)
    b["one"].take_grad(1, out=b["out"])


def _cupy_round(b: Buffers) -> None:
    device.cupy().copyto(b["sum"], b["source"])
    device.cupy().divide(b["sum"], np.float32(1), out=b["out"])


def _check_round(b: Buffers) -> None:
    check_same(b["out"], b["source"])


def _round_161(b: Buffers) -> None:
    _apply_161(b)
    b["taken"] = b["many"].take_grad(1)


def _check_round_161(b: Buffers) -> None:
    for name, array in b["arrays"].items():
        check_same(b["taken"][name], array)


class ExchangeOnDevice:
    """Gradients of the device, reduced over all ranks and back on the device."""

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[DeviceMemory] = DeviceMemory(6, host=Memory(shared=6, private=6))

    def __init__(self, group: Group, nbytes: int, _: Conditions) -> None:
        cupy, count = device.cupy(), nbytes // 4
        mine = gradient(group.rank, count)
        self._expected = cupy.asarray(sum_of_gradients(group.size, count))
        self._mine, self._out = cupy.asarray(mine), cupy.empty(count, np.float32)
        layout = Layout({"all": (count,)}, np.float32)
        sums: dict[str, Any] = {"reduction_type": "SUM"}
        self._reducer = Reducer(layout, group, "bench", **sums)
        self._host = Reducer(layout, group, "bench host", **sums)
        self._host.arrays()["all"][:] = mine
        # A row for bytes from the device, a row of bytes for it.
        self._memory = np.empty((2, count), np.float32)
        self._memory[1] = self._expected.get()
        self._pinned = device.Pinned(self._memory)
        self.kinds = [
            Kind("exchange", repeated(self._exchange), self._check, figures=_figures),
            Kind("out", repeated(self._to_host), self._check_memory, reference=True),
            Kind("back", repeated(self._to_device), self._check, reference=True),
            Kind("host", repeated(self._reduce), reference=True),
        ]

    def _exchange(self) -> None:
        self._reducer.reduce({"all": self._mine}, out={"all": self._out})
        device.current_stream().synchronize()

    def _to_host(self) -> None:
        self._mine.get(out=self._memory[0])

    def _check_memory(self) -> None:
        check_same(device.cupy().asarray(self._memory[0]), self._mine)

    def _to_device(self) -> None:
        self._out.set(self._memory[1])
        device.current_stream().synchronize()

    def _reduce(self) -> None:
        self._host.reduce()

    def _check(self) -> None:
        check_same(self._out, self._expected)

    def forget(self) -> None:
        """Overwrite the results."""
        self._out.fill(np.nan)
        self._memory[0] = np.nan

    def free(self) -> None:
        """Free the reducers. Collective."""
        self._pinned.free()
        self._reducer.free()
        self._host.free()


def _figures(medians: Mapping[str, float]) -> dict[str, float]:
    """Compare with pipelines that overlap no transfers, or all of them."""
    parts = [medians[name] for name in ("out", "back", "host")]
    whole = medians["exchange"]
    return {
        "times out, back and host one after the other": whole / sum(parts),
        "times the longest of them": whole / max(parts),
    }


DEVICE_BENCHMARKS: dict[str, type[Case]] = {
    "device sums": SumsOnDevice,
    "device arrays": ArraysOnDevice,
    "device rows": RowsOnDevice,
    "device updates": UpdatesOnDevice,
    "device rounds": RoundsOnDevice,
    "device exchange": ExchangeOnDevice,
}
