"""What is compared with: a plain copy, a plain exchange, and torch.distributed."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.measure import COPY, EXCHANGE, Kind, check_equal, repeated
from hpcaccum.dtypes import Array
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    from hpcaccum import Group


def plain_copy(target: Array, source: Array, ranks: int) -> Kind:
    """Return the copy by all ranks at once that defines the floor of memory."""
    run = repeated(lambda: np.copyto(target, source))
    return Kind(COPY, run, reference=True, moves=2 * ranks * source.nbytes)


class RingExchange:
    """Every node sends a vector to the next one, and receives one. Collective.

    So every link is in use in both directions at once, whether the number of nodes is
    even or odd. The ranks of a node send one stripe each, by Isend and Irecv: one rank
    may be slower than the link. On one node there is nothing to send, and no kind.

    Args:
        group: The ranks.
        nbytes: Of a vector.

    Attributes:
        kinds: For a `measure.Case`.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        nodes, number = group.nodes, group.node_number
        self.kinds: list[Kind] = []
        self._peers: tuple[int, int] | None = None
        self._group, self._comm = group, group.comm.Dup()
        # Ranks that the smallest node does not have send nothing.
        width, place = min(map(len, nodes)), nodes[number].index(group.rank)
        stripe = np.array_split(np.arange(nbytes // 4), width)[min(place, width - 1)]
        if len(nodes) == 1 or place >= width:
            stripe = stripe[:0]
        before, after = (number - 1) % len(nodes), (number + 1) % len(nodes)
        pattern = (stripe % 64).astype(np.float32)
        self._mine, self._expected = pattern + number, pattern + before
        self._got = np.zeros_like(pattern)
        if stripe.size:
            self._peers = nodes[before][place], nodes[after][place]
        if len(nodes) > 1:
            self.kinds = [
                Kind(EXCHANGE, self._run, self._check, reference=True, crosses=nbytes)
            ]

    def __call__(self) -> None:
        """Exchange once."""
        if self._peers is None:
            return
        before, after = self._peers
        requests = [
            self._comm.Irecv(self._got, before),
            self._comm.Isend(self._mine, after),
        ]
        MPI.Request.Waitall(requests)

    def _run(self, inner: int) -> list[float]:
        # A rank that begins late finds what others have sent already: all is sent when
        # the last rank is done.
        (mine,) = repeated(self)(inner)
        return [max(self._group.comm.allgather(mine))]

    def _check(self) -> None:
        check_equal(self._got, self._expected)

    def forget(self) -> None:
        """Overwrite the result."""
        self._got[:] = np.nan

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


def check_usable(what: str) -> None:
    """Raise InvalidArgumentError if torch is missing, or cannot be loaded."""
    try:
        importlib.import_module("torch.distributed")
    except (ImportError, OSError) as error:
        raise InvalidArgumentError(
            f"{what} needs PyTorch: {error} (pip install torch)"
        ) from None


class Gloo:
    """A process group of all ranks. Collective."""

    def __init__(self, group: Group) -> None:
        import torch
        import torch.distributed as distributed

        self._torch, self._distributed = torch, distributed
        # As many as the other kinds use.
        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo",
            init_method=group.comm.bcast(_rendezvous(group)),
            rank=group.rank,
            world_size=group.size,
        )

    def all_reduce(self, vector: np.ndarray[Any, Any]) -> None:
        """Replace a vector by the sum over all ranks. Collective."""
        self._distributed.all_reduce(self._torch.from_numpy(vector))

    def free(self) -> None:
        """Leave the process group. Collective."""
        self._distributed.destroy_process_group()


def _rendezvous(group: Group) -> str | None:
    """Return a free address on rank 0; None on the other ranks."""
    if group.rank != 0:
        return None
    host = "127.0.0.1" if group.node.size == group.size else MPI.Get_processor_name()
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"


# A local step that is never stale, and a bound of the staleness that none reaches.
NEVER_STALE = ANY_STALENESS = 1 << 30


def gradient(rank: int, count: int) -> Array:
    """Return the gradient of a rank: ``count`` elements of float32."""
    elements: Array = np.arange(count, dtype=np.float32) % 64
    elements += rank
    return elements


def sum_of_gradients(ranks: int, count: int) -> Array:
    """Return the sum of the gradients of the first ``ranks`` ranks."""
    total = gradient(0, count)
    total *= ranks
    total += ranks * (ranks - 1) / 2
    return total
