"""The reducer, compared with MPI_Allreduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hpcaccum import Layout, Reducer
from hpcaccum.bench.measure import (
    Case,
    Memory,
    Run,
    apart,
    check_equal,
    gradient,
    repeated,
    sum_everywhere,
    sum_of_gradients,
)
from hpcaccum.dtypes import Array

_ARRAYS = 32


class Allreduce(Case):
    """Sums of one vector over all ranks.

    - ``zero-copy``: in place in the reducer's arrays. Each of n ranks reads one stripe
      of all n vectors and writes it once: n + 1 times the bytes in all.
    - ``copying``: from arrays of the caller to others, ``reduce(mine, out=out)``. Each
      rank reads its vector and writes the result, and intermediate data may stay in the
      cache: 2 n times the bytes.
    - ``32 arrays``: the same bytes in 32 arrays, copying.
    - ``flat``: in place, by ``schedule="flat"``: the library's Iallreduce.
    - ``MPI``: the library's Allreduce.
    - ``gloo``: all_reduce of torch.distributed, in place, with ``--against gloo``.
    - ``exchange``: between N nodes, each sends the bytes to the next one. A sum must
      send 2 (N - 1) / N times the bytes over each link.
    - ``copy``: a plain copy by all ranks at once.
    """

    help = "the reducer, compared with the MPI library's Allreduce"
    memory = Memory(shared=3, shared_first=3, private=9)

    def _prepare(self) -> None:
        n, mine, out = self.n, gradient(self.rank, self.count), self._result()
        expected = sum_of_gradients(n, self.count)
        whole, pieces, out_pieces = {"all": mine}, _cut(mine), _cut(out)
        copied, many = self._reducer(whole), self._reducer(pieces)
        zero_copy = self._in_place(mine, expected, "auto")
        flat = self._in_place(mine, expected, "flat")
        link, bus = sum_everywhere(self.nodes), {"bus": 2 * (n - 1) / n}
        least = {**self._floor(n + 1, link), **bus}
        copies = {**self._floor(2 * n, link), **bus, "raw": "MPI"}

        def check() -> None:
            check_equal(out, expected)

        self._add("zero-copy", *zero_copy, raw="MPI", **least)
        copying = repeated(lambda: copied.reduce(whole, out={"all": out}))
        self._add("copying", copying, check, **copies)
        copying_many = repeated(lambda: many.reduce(pieces, out=out_pieces))
        self._add(f"{_ARRAYS} arrays", copying_many, check, **copies)
        self._add("flat", *flat, raw="MPI", **least)
        mpi = repeated(lambda: self.comm.Allreduce(mine, out))
        self._add("MPI", mpi, check, reference=True, **least)
        if self.gloo:
            gloo = apart(lambda: np.copyto(out, mine), lambda: _sum_by_gloo(out))
            self._add("gloo", gloo, check, reference=True, **least)
        self._add_plain(out, mine)

    def _reducer(self, arrays: dict[str, Array], schedule: str = "auto") -> Reducer:
        how: Any = {"reduction_type": "SUM", "schedule": schedule}
        return self._hold(Reducer(Layout.of(arrays), self.group, "bench", **how))

    def _in_place(
        self, mine: Array, expected: Array, schedule: str
    ) -> tuple[Run, Callable[[], None]]:
        reducer = self._reducer({"all": mine}, schedule)
        answer: dict[str, Array] = {}
        reducer.arrays()["all"][:] = mine
        run = repeated(lambda: answer.update(reducer.reduce()))
        return run, lambda: check_equal(answer["all"], expected)


def _sum_by_gloo(vector: Array) -> None:
    import torch
    import torch.distributed

    torch.distributed.all_reduce(torch.from_numpy(vector))


def _cut(vector: Array) -> dict[str, Array]:
    pieces = vector.reshape(_ARRAYS, -1)
    return {f"array{number}": piece for number, piece in enumerate(pieces)}
