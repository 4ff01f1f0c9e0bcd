"""The CPU backend of torch.distributed, for comparison."""

from __future__ import annotations

import importlib
import socket
from typing import TYPE_CHECKING, Any

from hpcaccum import InvalidArgumentError
from hpcaccum.mpi import MPI

if TYPE_CHECKING:
    import numpy as np

    from hpcaccum import Group


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
