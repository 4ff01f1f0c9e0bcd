"""The reducer, compared with MPI_Allreduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcaccum import Layout, Reducer
from hpcaccum.bench.measure import (
    Kind,
    Memory,
    apart,
    check_equal,
    repeated,
    sum_everywhere,
)
from hpcaccum.bench.references import (
    RingExchange,
    gradient,
    plain_copy,
    sum_of_gradients,
)

if TYPE_CHECKING:
    from hpcaccum import Group
    from hpcaccum.bench.measure import Conditions
    from hpcaccum.dtypes import Array

_ARRAYS = 32


class Allreduce:
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

    Args:
        group: The ranks.
        nbytes: Of a vector.
        conditions: Whether to measure gloo as well.
    """

    least_ranks: ClassVar[int] = 1
    memory: ClassVar[Memory] = Memory(shared=3, shared_first=3, private=9)

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        count, n = nbytes // 4, group.size
        self._comm, self._gloo = group.comm, conditions.gloo
        self._mine = gradient(group.rank, count)
        self._expected = sum_of_gradients(n, count)
        self._out = np.zeros_like(self._mine)
        self._answer: Array = self._out

        def make(arrays: dict[str, Array], schedule: str) -> Reducer:
            return Reducer(
                Layout.of(arrays),
                group,
                "bench",
                reduction_type="SUM",
                schedule=schedule,
            )

        whole = {"all": self._mine}
        self._one, self._flat = make(whole, "auto"), make(whole, "flat")
        self._copied = make(whole, "auto")
        self._pieces, self._out_pieces = _cut(self._mine), _cut(self._out)
        self._many = make(self._pieces, "auto")
        self._in_place(self._one)
        self._in_place(self._flat)
        self._exchange = RingExchange(group, nbytes)
        self.kinds = self._kinds(nbytes, n, len(group.nodes))

    def _in_place(self, reducer: Reducer) -> None:
        reducer.arrays()["all"][:] = self._mine

    def _kinds(self, nbytes: int, n: int, nodes: int) -> list[Kind]:
        # Between nodes, the network is the limit, not memory.
        least = (n + 1) * nbytes if nodes == 1 else 0
        copied = 2 * n * nbytes if nodes == 1 else 0
        common: Any = {
            "crosses": sum_everywhere(nodes) * nbytes,
            "bus": 2 * (n - 1) / n,
        }
        ours = {
            "zero-copy": (lambda: self._reduce(self._one), least),
            "copying": (self._copying, copied),
            f"{_ARRAYS} arrays": (self._many_arrays, copied),
            "flat": (lambda: self._reduce(self._flat), least),
        }
        kinds = [
            Kind(name, repeated(run), self._check, raw="MPI", moves=moves, **common)
            for name, (run, moves) in ours.items()
        ]
        others = {"MPI": repeated(self._mpi)}
        if self._gloo:
            others["gloo"] = apart(self._refill, self._gloo_sum, lambda: None)
        kinds += [
            Kind(name, run, self._check, reference=True, moves=least, **common)
            for name, run in others.items()
        ]
        return [*kinds, *self._exchange.kinds, plain_copy(self._out, self._mine, n)]

    def _reduce(self, reducer: Reducer) -> None:
        self._answer = reducer.reduce()["all"]

    def _copying(self) -> None:
        self._copied.reduce({"all": self._mine}, out={"all": self._out})

    def _many_arrays(self) -> None:
        self._many.reduce(self._pieces, out=self._out_pieces)

    def _mpi(self) -> None:
        self._comm.Allreduce(self._mine, self._out)

    def _refill(self) -> None:
        np.copyto(self._out, self._mine)

    def _gloo_sum(self) -> None:
        assert self._gloo is not None
        self._gloo.all_reduce(self._out)

    def _check(self) -> None:
        check_equal(self._answer, self._expected)

    def forget(self) -> None:
        """Overwrite the results outside of the reducers."""
        self._out[:] = np.nan
        self._answer = self._out
        self._exchange.forget()

    def free(self) -> None:
        """Free the reducers. Collective."""
        self._answer = self._out
        for reducer in (self._one, self._copied, self._flat, self._many):
            reducer.free()
        self._exchange.free()


def _cut(vector: Array) -> dict[str, Array]:
    pieces = vector.reshape(_ARRAYS, -1)
    return {f"array{number}": piece for number, piece in enumerate(pieces)}
