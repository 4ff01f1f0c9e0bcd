"""The reducer, compared with MPI_Allreduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import Layout, Reducer
from hpcaccum.bench.measure import (
    Case,
    Memory,
    apart,
    check_equal,
    gradient,
    repeated,
    sum_everywhere,
    sum_of_gradients,
)

if TYPE_CHECKING:
    from hpcaccum.bench.measure import Run
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
        self._out, self._answer = out, out
        whole, pieces, out_pieces = {"all": mine}, _cut(mine), _cut(out)
        copied, many = self._reducer(whole), self._reducer(pieces)
        zero_copy, flat = self._in_place(mine, "auto"), self._in_place(mine, "flat")
        link, bus = sum_everywhere(self.nodes), {"bus": 2 * (n - 1) / n}
        least = {**self._floor(n + 1, link), **bus}
        copies = {**self._floor(2 * n, link), **bus, "raw": "MPI"}

        def check() -> None:
            check_equal(out, expected)

        def check_answer() -> None:
            check_equal(self._answer, expected)

        self._add("zero-copy", zero_copy, check_answer, raw="MPI", **least)
        copying = repeated(lambda: copied.reduce(whole, out={"all": out}))
        self._add("copying", copying, check, **copies)
        copying_many = repeated(lambda: many.reduce(pieces, out=out_pieces))
        self._add(f"{_ARRAYS} arrays", copying_many, check, **copies)
        self._add("flat", flat, check_answer, raw="MPI", **least)
        mpi = repeated(lambda: self.comm.Allreduce(mine, out))
        self._add("MPI", mpi, check, reference=True, **least)
        if self.gloo:
            gloo = apart(lambda: np.copyto(out, mine), self._gloo_sum)
            self._add("gloo", gloo, check, reference=True, **least)
        self._add_plain(out, mine)

    def _reducer(self, arrays: dict[str, Array], schedule: str = "auto") -> Reducer:
        how: Any = {"reduction_type": "SUM", "schedule": schedule}
        made = Reducer(Layout.of(arrays), self.group, "bench", **how)
        self._hold(made)
        return made

    def _in_place(self, mine: Array, schedule: str) -> Run:
        reducer = self._reducer({"all": mine}, schedule)
        reducer.arrays()["all"][:] = mine

        def reduce() -> None:
            self._answer = reducer.reduce()["all"]

        return repeated(reduce)

    def _gloo_sum(self) -> None:
        import torch
        import torch.distributed

        torch.distributed.all_reduce(torch.from_numpy(self._out))


def _cut(vector: Array) -> dict[str, Array]:
    pieces = vector.reshape(_ARRAYS, -1)
    return {f"array{number}": piece for number, piece in enumerate(pieces)}
