"""What the adapters of other libraries have in common; see `torch` and `jax`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypedDict

from hpcaccum.accumulator import Tally
from hpcaccum.mpi import Freeable, Group
from hpcaccum.optimizers.cross_shard import CrossShardOptimizer
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.one_sided import OneSidedOptimizer

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class ServerArguments(TypedDict, total=False):
    """What adapters with a server accept by keyword; see `OneSidedOptimizer`."""

    comm: mpi4py_MPI.Comm | Group | None
    host: int
    dedicated: bool
    on_nonfinite: OnNonfinite
    min_workers: int


class AdapterBase(Freeable):
    """The base of adapters: holds the optimizer that exchanges gradients."""

    _exchange: CrossShardOptimizer | OneSidedOptimizer
    # What messages call it.
    _what: str

    @property
    def global_step(self) -> int:
        """Number of updates so far; after `free`, in total."""
        return self._exchange.global_step

    def every(self, n: int) -> bool:
        """Return whether training has reached a multiple of n. Not collective.

        As `every` of the optimizer of the same strategy.
        """
        return self._exchange.every(n)

    def statistics(self) -> Tally:
        """Return how many gradients of each rank were accepted and dropped so far."""
        return self._exchange.statistics()

    def _describe(self) -> str:
        return self._what


def check_known(what: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword argument that an adapter does not have."""
    for name in {*options} - {*known}:
        raise TypeError(f"{what} got an unexpected keyword argument {name!r}")
