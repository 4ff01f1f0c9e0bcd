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
- device rounds: of a DeviceAccumulator. ``apply`` of one array, ``apply 161``.
- device exchange: ``exchange``: a reducer, from the device and back to it; ``out`` and
  ``back``: the bytes over the bus, from and to pinned memory; ``host``: the reducer
  alone, in CPU memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcaccum import DeviceAccumulator, Layout, Reducer, device
from hpcaccum.bench.measure import (
    COPY,
    NEVER_STALE,
    Case,
    Memory,
    Run,
    check_equal,
    gradient,
    repeated,
    sum_of_gradients,
)
from hpcaccum.bench.report import Column, Columns
from hpcaccum.device import PointerTable, kernels
from hpcaccum.optimizers import SGD, Adam, Variable

# Relative sizes of 161 arrays: roughly those of ResNet-50.
_SHARES = [64 * 64 * 9] * 120 + [2048 * 512] * 20 + [256] * 21
_WIDTH = 128
_CLIP = 1.0
_RATE, _BETA1, _BETA2, _EPSILON = 1e-3, 0.9, 0.999, 1e-8
# With the bias correction of the first update.
_FIRST_RATE = _RATE * math.sqrt(1 - _BETA2) / (1 - _BETA1)


def timed(operation: Callable[[], object]) -> Run:
    """Return a `Kind.run` that measures time on the device, between two events."""

    def run(inner: int) -> list[float]:
        cuda = device.cupy().cuda
        begin, end = cuda.Event(), cuda.Event()
        begin.record()
        for _ in range(inner):
            operation()
        end.record()
        end.synchronize()
        seconds = cuda.get_elapsed_time(begin, end) / 1e3
        return [max(seconds / inner, 1e-9)]

    return run


def check_same(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Do as `check_equal` for device arrays, or mappings of them."""
    if isinstance(actual, dict):
        for name, array in expected.items():
            check_same(actual[name], array, tolerance)
    else:
        check_equal(actual.get(), expected.get(), tolerance)


def _launch(name: str, count: int, *arguments: Any) -> None:
    """Launch a kernel over ``count`` elements."""
    grid = (kernels.blocks(count),)
    kernels.kernel(name)(grid, (kernels.THREADS,), arguments)


class DeviceCase(Case):
    """Contests at one size, and a copy of that size, which is the floor of all."""

    sizes = "1G"
    # The most that any of them needs.
    memory = Memory(private=4, device=14)
    columns = Columns(
        "one operation; n: samples; p99: from 100 samples on\n"
        "GB/s: the size over the median; moved: the same of all bytes that must move\n"
        "vsCuPy: times faster than plain CuPy; copy: fraction of the rate of a plain "
        "copy",
        (
            Column("GB/s", 5, lambda row: row.algbw),
            Column("moved", 5, lambda row: row.busbw),
            Column("vsCuPy", 6, lambda row: row.vs_mpi),
            Column("copy", 5, lambda row: 1 / row.vs_floor if row.vs_floor else None),
        ),
    )

    def _contest(
        self,
        name: str,
        moves: float,
        ours: Callable[[], object],
        cupy: Callable[[], object],
        *results: Any,
        tolerance: float = 0.0,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Add a task; without a check, plain CuPy must have the same results."""

        def compare() -> None:
            found = [each.copy() for each in results]
            self.forget()
            cupy()
            for each, expected in zip(found, results, strict=True):
                check_same(each, expected, tolerance)

        rival, more = f"{name} CuPy", self._moving(moves)
        self._add(name, timed(ours), check or compare, raw=rival, **more)
        self._add(rival, timed(cupy), reference=True, **more)

    def _moving(self, moves: float) -> dict[str, Any]:
        """Return what a task has that must read and write ``moves`` times the size."""
        # The bus bandwidth is that of all bytes moved.
        return {"floor": (COPY, moves / 2), "bus": moves}

    def _add_copy(self, source: Any) -> None:
        target = self._result(device.cupy().empty_like(source))
        copy = timed(lambda: device.cupy().copyto(target, source))
        check = functools.partial(check_same, target, source)
        self._add(COPY, copy, check, reference=True, **self._moving(2))

    @functools.cached_property
    def _random(self) -> Any:
        return device.cupy().random.default_rng(self.rank)

    def _normal(self, count: int) -> Any:
        return self._random.standard_normal(count, dtype=np.float32)

    def _normal_arrays(self, layout: Layout) -> dict[str, Any]:
        return {name: self._normal(size) for name, (size,) in layout.shapes.items()}


class _Sums(DeviceCase):
    def _prepare(self) -> None:
        cupy, count, size = device.cupy(), self.count, np.int64(self.count)
        source = self._normal(count)
        half = source.astype(np.float16)
        total = self._result(cupy.empty_like(source), 3)
        target = self._result(cupy.empty_like(source))
        partial, square = cupy.empty(4096, np.float64), cupy.zeros(1, np.float64)
        ticket = cupy.zeros(1, np.int64)

        def add(kernel: str, array: Any) -> None:
            more = np.float32(1), size, np.int32(0)
            _launch(f"accumulate_{kernel}", count, total, array, *more)

        def mean() -> None:
            _launch("mean_f32", count, target, total, size, np.float64(3))

        def clip() -> None:
            norm = source, size, partial, ticket, square
            _launch("square_norm_f32", count, *norm)
            clipped = target, source, size, np.float64(1), square, np.float64(_CLIP)
            _launch("mean_clip_f32", count, *clipped)

        def cupy_clip() -> None:
            # One pass of cuBLAS: linalg.norm makes a temporary array.
            norm = cupy.sqrt(cupy.dot(source, source))
            cupy.multiply(source, cupy.minimum(_CLIP / norm, 1), out=target)

        self._contest(
            "add f32",
            3,
            lambda: add("f32", source),
            lambda: cupy.add(total, source, out=total),
            total,
        )
        self._contest(
            "add f16",
            2.5,
            lambda: add("f16", half),
            lambda: cupy.add(total, half, out=total),
            total,
        )
        self._contest(
            "mean", 2, mean, lambda: cupy.divide(total, 3.0, out=target), target
        )
        self._contest("clip", 3, clip, cupy_clip, target, tolerance=1e-3)
        self._add_copy(source)


class _Arrays(DeviceCase):
    def _prepare(self) -> None:
        cupy, layout, elements = device.cupy(), *_many_arrays(self.count)
        share = 4 * elements / self.nbytes
        packed = self._normal(layout.size)
        flat = self._result(cupy.zeros(layout.size, np.float32), 3)
        parts, sums = layout.views(packed), layout.views(flat)
        arrays, outs = self._normal_arrays(layout), self._normal_arrays(layout)
        dense = cupy.empty(elements, np.float32)
        table = PointerTable(layout)
        for out in outs.values():
            self._result(out)

        def cupy_add() -> None:
            for name, array in arrays.items():
                cupy.add(sums[name], array, out=sums[name])

        def cupy_pack() -> None:
            cupy.concatenate(list(arrays.values()), out=dense)

        def check_packed() -> None:
            # CuPy packs without the gaps of the layout.
            cupy_pack()
            check_same(sums, arrays)
            check_same(dense, cupy.concatenate(list(arrays.values())))

        def cupy_unpack() -> None:
            for name, out in outs.items():
                cupy.copyto(out, parts[name])

        self._contest(
            "add", 3 * share, lambda: table.addition(flat, arrays)(), cupy_add, flat
        )
        self._contest(
            "pack",
            2 * share,
            lambda: table.pack(flat, arrays),
            cupy_pack,
            check=check_packed,
        )
        self._contest(
            "unpack",
            2 * share,
            lambda: table.unpack(packed, outs),
            cupy_unpack,
            *outs.values(),
        )
        self._add_copy(self._normal(self.count))


def _many_arrays(count: int) -> tuple[Layout, int]:
    """Return the layout of 161 arrays of about ``count`` elements, and their number."""
    part = count / sum(_SHARES)
    sizes = [max(1, int(share * part)) for share in _SHARES]
    shapes = {f"array{number}": (size,) for number, size in enumerate(sizes)}
    return Layout(shapes, np.float32), sum(sizes)


class _Rows(DeviceCase):
    def _prepare(self) -> None:
        cupy, number = device.cupy(), max(1, self.count // _WIDTH)
        source = self._normal(number * _WIDTH)
        # Small integers: sums are exact in any order.
        values = cupy.floor(source * np.float32(4)).reshape(number, _WIDTH)
        rows = self._random.integers(0, 2 * number, number)
        total = self._result(cupy.empty((2 * number, _WIDTH), np.float32), 6)
        weights = self._result(cupy.zeros(2 * number, np.float32), 0)
        refused = cupy.zeros(1, np.int64)
        given = self._random.integers(0, 4, 2 * number).astype(np.float32)
        divisors = cupy.maximum(given, 1)[:, None]
        # Values and indices are read; sums and weights are read and written.
        added = 12 * values.size + 16 * number
        divided = 4 * given.size + 8 * _WIDTH * int((given > 1).sum())

        def scatter() -> None:
            arrays = total, weights, values, rows
            sizes = map(np.int64, (number, _WIDTH, 2 * number))
            more = np.float32(1), refused
            _launch("scatter_add_rows_f32", values.size, *arrays, *sizes, *more)

        def cupy_scatter() -> None:
            cupy.add.at(total, rows, values)
            cupy.add.at(weights, rows, 1)

        def mean() -> None:
            sizes = map(np.int64, (2 * number, _WIDTH))
            _launch("mean_rows_f32", total.size, total, given, *sizes)

        self._contest(
            "scatter", added / self.nbytes, scatter, cupy_scatter, total, weights
        )
        self._contest(
            "mean rows",
            divided / self.nbytes,
            mean,
            lambda: cupy.divide(total, divisors, out=total),
            total,
        )
        self._add_copy(source)


class _Updates(DeviceCase):
    def _prepare(self) -> None:
        cupy, source = device.cupy(), self._normal(self.count)
        value = self._result(cupy.empty_like(source), 3)
        scratch = cupy.empty_like(source)
        pairs = [(source, Variable(value, "value"))]
        sgd, adam = SGD(1), Adam(_RATE, _BETA1, _BETA2, _EPSILON)
        adam.apply_gradients(pairs)
        m, v, _ = (self._result(each.value, 0) for each in adam.variables())

        def cupy_adam() -> None:
            cupy.multiply(m, _BETA1, out=m)
            cupy.multiply(source, 1 - _BETA1, out=scratch)
            cupy.add(m, scratch, out=m)
            cupy.multiply(v, _BETA2, out=v)
            cupy.multiply(source, source, out=scratch)
            cupy.multiply(scratch, 1 - _BETA2, out=scratch)
            cupy.add(v, scratch, out=v)
            cupy.sqrt(v, out=scratch)
            cupy.add(scratch, _EPSILON, out=scratch)
            cupy.divide(m, scratch, out=scratch)
            cupy.multiply(scratch, _FIRST_RATE, out=scratch)
            cupy.subtract(value, scratch, out=value)

        self._contest(
            "sgd",
            3,
            lambda: sgd.apply_gradients(pairs),
            # Complete only with a rate of 1: any other needs a second pass.
            lambda: cupy.subtract(value, source, out=value),
            value,
        )
        self._contest(
            "adam",
            7,
            lambda: adam.apply_gradients(pairs),
            cupy_adam,
            *(value, m, v),
            tolerance=1e-6,
        )
        self._add_copy(source)


class _Rounds(DeviceCase):
    def _prepare(self) -> None:
        layout, elements = _many_arrays(self.count)
        source, arrays = self._normal(self.count), self._normal_arrays(layout)
        share = elements / self.count
        self._ready: list[Callable[[], None]] = []
        self._add_applies("apply", 3, source, (self.count,))
        self._add_applies("apply 161", 3 * share, arrays, layout.shapes)
        self._add_copy(source)

    def _add_applies(self, name: str, moves: float, grad: Any, shapes: Any) -> None:
        accumulator = self._hold(DeviceAccumulator("float32", shapes))

        def apply() -> None:
            accumulator.apply_grad(grad, NEVER_STALE)

        def ready() -> None:
            """Leave one gradient in the accumulator."""
            if accumulator.num_accumulated():
                accumulator.take_grad(1)
            apply()

        def check() -> None:
            check_equal(np.array([accumulator.num_accumulated()]), 2)
            check_same(accumulator.take_grad(2), grad)

        self._ready.append(ready)
        self._add(name, timed(apply), check, **self._moving(moves))

    def forget(self) -> None:
        """Overwrite the results."""
        super().forget()
        for ready in self._ready:
            ready()


class _Exchange(DeviceCase):
    memory = Memory(shared=6, private=8, device=6)

    def _prepare(self) -> None:
        cupy, count = device.cupy(), self.count
        mine, expected = gradient(self.rank, count), sum_of_gradients(self.n, count)
        on_device, out = cupy.asarray(mine), cupy.empty(count, np.float32)
        layout = Layout({"all": (count,)}, np.float32)
        sums: Any = {"reduction_type": "SUM"}
        reducer = self._hold(Reducer(layout, self.group, "bench", **sums))
        host = self._hold(Reducer(layout, self.group, "bench host", **sums))
        host.arrays()["all"][:] = mine
        # A row for bytes from the device, a row of bytes for it.
        memory = np.empty((2, count), np.float32)
        memory[1] = expected
        self._hold(device.Pinned(memory))
        self._result(out)
        self._result(memory[0])

        def exchange() -> None:
            reducer.reduce({"all": on_device}, out={"all": out})
            device.current_stream().synchronize()

        def back() -> None:
            out.set(memory[1])
            device.current_stream().synchronize()

        def check() -> None:
            check_equal(out.get(), expected)

        self._add("exchange", repeated(exchange), check)
        self._add(
            "out",
            repeated(lambda: on_device.get(out=memory[0])),
            lambda: check_equal(memory[0], mine),
            reference=True,
        )
        self._add("back", repeated(back), check, reference=True)
        self._add("host", repeated(host.reduce), reference=True)


DEVICE_BENCHMARKS: dict[str, type[Case]] = {
    "device sums": _Sums,
    "device arrays": _Arrays,
    "device rows": _Rows,
    "device updates": _Updates,
    "device rounds": _Rounds,
    "device exchange": _Exchange,
}
