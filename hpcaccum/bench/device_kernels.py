"""Kernels beside plain CuPy; `hpcaccum.bench.device` describes the cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import Layout, device
from hpcaccum.bench.device_case import (
    Contest,
    DeviceCase,
    DeviceMemory,
    check_same,
    launch,
)
from hpcaccum.device import PointerTable

if TYPE_CHECKING:
    from hpcaccum.bench.device_case import Buffers

# Relative sizes of 161 arrays: roughly those of ResNet-50.
_SHARES = [64 * 64 * 9] * 120 + [2048 * 512] * 20 + [256] * 21
_WIDTH = 128
_CLIP = 1.0


class SumsOnDevice(DeviceCase):
    """One array added to a sum, and the reductions of the sum."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(12)

    def make(self, count: int) -> Buffers:
        """Return a gradient in two dtypes, sums, and scratch memory of kernels."""
        cupy, source = device.cupy(), self.normal(count)
        return {
            "source": source,
            "half": source.astype(np.float16),
            "sum": cupy.empty_like(source),
            "target": cupy.empty_like(source),
            "partial": cupy.empty(4096, np.float64),
            "ticket": cupy.zeros(1, np.int64),
            "square": cupy.zeros(1, np.float64),
        }

    def spoil(self, buffers: Buffers) -> None:
        """Fill the sum with 3."""
        buffers["sum"].fill(3)

    def compete(self, nbytes: int) -> list[Contest]:
        """Return the contests to measure."""
        return [
            _adding("add f32", "source", "f32", 3 * nbytes),
            _adding("add f16", "half", "f16", 2.5 * nbytes),
            Contest("mean", _mean, _cupy_mean, 2 * nbytes, _check_mean),
            Contest("clip", _clip, _cupy_clip, 3 * nbytes, _check_clip),
        ]


def _adding(name: str, source: str, suffix: str, moves: float) -> Contest:
    def ours(b: Buffers) -> None:
        size, one = b["sum"].size, np.float32(1)
        arrays, more = (b["sum"], b[source]), (np.int64(size), np.int32(0))
        launch(f"accumulate_{suffix}", size, *arrays, one, *more)

    def cupy(b: Buffers) -> None:
        device.cupy().add(b["sum"], b[source], out=b["sum"])

    def check(b: Buffers) -> None:
        check_same(b["sum"], b[source].astype(np.float32) + np.float32(3))

    return Contest(name, ours, cupy, moves, check)


def _mean(b: Buffers) -> None:
    size = b["sum"].size
    launch("mean_f32", size, b["target"], b["sum"], np.int64(size), np.int64(3))


def _cupy_mean(b: Buffers) -> None:
    device.cupy().divide(b["sum"], np.float32(3), out=b["target"])


def _check_mean(b: Buffers) -> None:
    check_same(b["target"], b["sum"] / np.float32(3))


def _clip(b: Buffers) -> None:
    source, size, square = b["source"], b["source"].size, b["square"]
    count = np.int64(size)
    launch("square_norm_f32", size, source, count, b["partial"], b["ticket"], square)
    more = np.int64(1), square, np.float64(_CLIP)
    launch("mean_clip_f32", size, b["target"], source, count, *more)


def _cupy_clip(b: Buffers) -> None:
    cupy, source = device.cupy(), b["source"]
    # One pass of cuBLAS: linalg.norm makes a temporary array.
    norm = cupy.sqrt(cupy.dot(source, source))
    cupy.multiply(source, cupy.minimum(_CLIP / norm, 1), out=b["target"])


def _check_clip(b: Buffers) -> None:
    norm = float(device.cupy().linalg.norm(b["source"]))
    check_same(b["target"], b["source"] * np.float32(min(1, _CLIP / norm)), 1e-3)


class ArraysOnDevice(DeviceCase):
    """Many small arrays, in one launch."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(8)

    def make(self, count: int) -> Buffers:
        """Return arrays, and flat buffers of them."""
        cupy = device.cupy()
        layout = many_arrays(count)
        flat, packed = cupy.zeros(layout.size, np.float32), self.normal(layout.size)
        return {
            "source": self.normal(count),
            "target": cupy.empty(count, np.float32),
            "arrays": self._random_arrays(layout),
            "from": packed,
            "parts": layout.views(packed),
            "outs": self._random_arrays(layout),
            "flat": flat,
            "views": layout.views(flat),
            "dense": cupy.empty(elements(layout), np.float32),
            "table": PointerTable(layout),
        }

    def _random_arrays(self, layout: Layout) -> dict[str, Any]:
        sizes = {name: shape[0] for name, shape in layout.shapes.items()}
        return {name: self.normal(size) for name, size in sizes.items()}

    def spoil(self, buffers: Buffers) -> None:
        """Fill the sum with 3."""
        buffers["flat"].fill(3)
        for each in (*buffers["outs"].values(), buffers["dense"]):
            each.fill(np.nan)

    def compete(self, nbytes: int) -> list[Contest]:
        """Return the contests to measure."""
        moved = 4 * elements(many_arrays(nbytes // 4))
        return [
            Contest("add", _add_many, _cupy_add_many, 3 * moved, _check_add_many),
            Contest("pack", _pack, _cupy_pack, 2 * moved, _check_pack, _check_dense),
            Contest("unpack", _unpack, _cupy_unpack, 2 * moved, _check_unpack),
        ]


def many_arrays(count: int) -> Layout:
    """Return the layout of 161 arrays of about ``count`` elements together."""
    part = count / sum(_SHARES)
    shapes = {
        f"array{number}": (max(1, int(share * part)),)
        for number, share in enumerate(_SHARES)
    }
    return Layout(shapes, np.float32)


def elements(layout: Layout) -> int:
    """Return how many elements the arrays have, without the gaps between them."""
    return sum(shape[0] for shape in layout.shapes.values())


def _add_many(b: Buffers) -> None:
    b["table"].accumulate(b["flat"], b["arrays"])


def _cupy_add_many(b: Buffers) -> None:
    add, views = device.cupy().add, b["views"]
    for name, array in b["arrays"].items():
        add(views[name], array, out=views[name])


def _check_add_many(b: Buffers) -> None:
    for name, array in b["arrays"].items():
        check_same(b["views"][name], array + np.float32(3))


def _pack(b: Buffers) -> None:
    b["table"].pack(b["flat"], b["arrays"])


def _check_pack(b: Buffers) -> None:
    for name, array in b["arrays"].items():
        check_same(b["views"][name], array)


def _cupy_pack(b: Buffers) -> None:
    device.cupy().concatenate(list(b["arrays"].values()), out=b["dense"])


def _check_dense(b: Buffers) -> None:
    first = 0
    for array in b["arrays"].values():
        check_same(b["dense"][first : first + array.size], array)
        first += array.size


def _unpack(b: Buffers) -> None:
    b["table"].unpack(b["from"], b["outs"])


def _cupy_unpack(b: Buffers) -> None:
    copyto = device.cupy().copyto
    for name, out in b["outs"].items():
        copyto(out, b["parts"][name])


def _check_unpack(b: Buffers) -> None:
    for name, out in b["outs"].items():
        check_same(out, b["parts"][name])


class RowsOnDevice(DeviceCase):
    """Rows of a matrix."""

    memory: ClassVar[DeviceMemory] = DeviceMemory(14)

    def make(self, count: int) -> Buffers:
        """Return rows, their indices, and the matrix."""
        cupy, number = device.cupy(), max(1, count // _WIDTH)
        source = self.normal(number * _WIDTH)
        return {
            "source": source,
            "target": cupy.empty_like(source),
            # Small integers: sums are exact in any order.
            "values": cupy.floor(source * np.float32(4)).reshape(number, _WIDTH),
            "rows": self.random.integers(0, 2 * number, number),
            "sum": cupy.empty((2 * number, _WIDTH), np.float32),
            "counts": cupy.zeros(2 * number, np.int32),
            "given": self.random.integers(0, 4, 2 * number).astype(np.int32),
            "refused": cupy.zeros(1, np.int64),
        }

    def spoil(self, buffers: Buffers) -> None:
        """Fill the matrix with 6, and reset the counts."""
        buffers["sum"].fill(6)
        buffers["counts"].fill(0)

    def compete(self, nbytes: int) -> list[Contest]:
        """Return the contests to measure."""
        values, given = self._sets[0]["values"], self._sets[0]["given"]
        # Values and indices are read; sums and counts are read and written.
        added = 12 * values.size + 16 * len(values)
        divided = 4 * given.size + 8 * _WIDTH * int((given > 1).sum())
        scatter = Contest("scatter", _scatter, _cupy_scatter, added, _check_scatter)
        mean = Contest("mean rows", _rows, _cupy_rows, divided, _check_rows)
        return [scatter, mean]


def _scatter(b: Buffers) -> None:
    rows, values = b["rows"], b["values"]
    sizes = (len(rows), _WIDTH, len(b["sum"]))
    launch(
        "scatter_add_rows_f32",
        values.size,
        *(b["sum"], b["counts"], values, rows),
        *(*map(np.int64, sizes), b["refused"]),
    )


def _cupy_scatter(b: Buffers) -> None:
    add_at = device.cupy().add.at
    add_at(b["sum"], b["rows"], b["values"])
    add_at(b["counts"], b["rows"], 1)


def _check_scatter(b: Buffers) -> None:
    expected, counts = b["sum"] * 0 + 6, b["counts"] * 0
    add_at = device.cupy().add.at
    add_at(expected, b["rows"], b["values"])
    add_at(counts, b["rows"], 1)
    check_same(b["sum"], expected)
    check_same(b["counts"], counts)


def _rows(b: Buffers) -> None:
    sizes = (len(b["sum"]), _WIDTH)
    arrays = b["sum"], b["given"]
    launch("mean_rows_f32", b["sum"].size, *arrays, *map(np.int64, sizes))


def _cupy_rows(b: Buffers) -> None:
    cupy = device.cupy()
    counts = cupy.maximum(b["given"], 1).astype(np.float32)
    cupy.divide(b["sum"], counts[:, None], out=b["sum"])


def _check_rows(b: Buffers) -> None:
    counts = device.cupy().maximum(b["given"], 1).astype(np.float32)
    check_same(b["sum"], b["sum"] * 0 + 6 / counts[:, None])
