"""What a server is made of: which ranks hold the center, its inbox, other options.

An inbox is where a server takes its gradients from, a policy of admission.
`QuorumInbox` passes on the gradients of a quorum together, `BoundedStalenessInbox` each
gradient separately. Another one has the same methods and attributes; these need an
explanation:

``adds``: Whether the gradients of several ranks are added. The parameters of an update
    are then sent to their nodes unasked.
``needs_all``: Whether each rank that has not left gives one gradient of each update, so
    that none is made without it.
``next``: Its block reads gradients, or none if all of them were given up. At the
    end, their ranks may write new ones. If it raises, the next call gives the same
    gradients again, without those on a node that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcaccum.accumulator import Tally
from hpcaccum.arguments import check_wire_dtype, positive_count, rank_number
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import MPI, Group
from hpcaccum.rows import RowPlace
from hpcaccum.server.bounded_staleness import BoundedStalenessInbox
from hpcaccum.server.quorum import QuorumInbox

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

Inbox = QuorumInbox | BoundedStalenessInbox
# Makes an inbox, given the name for messages, the size and the dtype of a gradient, and
# the places of rows in it.
MakeInbox = Callable[[str, int, np.dtype[Any], Sequence[RowPlace]], Inbox]

# What `servers=` accepts.
Servers = Literal["auto"] | int | Sequence[int] | None

AUTO = "auto"
# Bytes of variables from which on "auto" takes several servers. Measured on 4 hosts,
# links of 1 Gbit/s: at 16 MiB 0.3 to 0.5 of the time of one server, at 1 MiB 0.4 to
# 1.2, at 256 KiB no less.
LARGE = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Options that all one-sided optimizers have; see `OneSidedOptimizer`."""

    comm: mpi4py_MPI.Comm | Group | None
    host: int
    dedicated: bool
    servers: Servers
    on_nonfinite: Any
    min_workers: int
    wire_dtype: Any = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The servers, once they are known."""
        assert isinstance(self.servers, tuple)
        return self.servers

    def facts(self, size: int) -> dict[str, Any]:
        """Return what must be the same on all ranks, and the number that train."""
        host, ranks = _server_ranks(self.servers, self.host, size, self.dedicated)
        return {
            "host": host,
            "servers": ranks,
            "dedicated": bool(self.dedicated),
            "min_workers": positive_count(self.min_workers, "min_workers"),
            "wire_dtype": check_wire_dtype(self.wire_dtype),
            "workers": size - len(ranks or ()) * bool(self.dedicated),
        }


@dataclass(frozen=True)
class ServerSetup:
    """What a `ParameterServer` is made of; on all ranks the same, but for values.

    Attributes:
        group: The ranks.
        initial: Name to array, the same names and shapes on all ranks; the center
            starts with the root's.
        make_inbox: See `MakeInbox`.
        options: Of the optimizer, with the ranks that hold parts of the center and
            update them, each on another node. The first, the root, decides what makes
            each update. Dedicated servers must call `serve`.
        what: Name for messages.
        elementwise: Whether a part of the center may begin within a variable.
        capacities: Name of each sparse variable to the maximum number of rows of the
            gradients of a rank in one update. There is one server then.
        step, tally: Where an earlier server ended (`ServerState`), to continue from it;
            the same on all ranks.
    """

    group: Group
    initial: Mapping[str, Array]
    make_inbox: MakeInbox
    options: ServerOptions
    what: str
    elementwise: bool
    capacities: Mapping[str, int]
    step: int = 0
    tally: Tally | None = None


def _server_ranks(
    servers: Any, host: Any, size: int, dedicated: bool
) -> tuple[int, tuple[int, ...] | None]:
    """Return the host, and the ranks that hold the center; None for "auto"."""
    host, ranks = rank_number(host, size, "host"), _ranks(servers, size)
    if servers is None or (ranks is None and dedicated):
        ranks = (host,)
    if ranks is not None and host not in (0, ranks[0]):
        raise InvalidArgumentError(
            f"the first of servers must be the host; got servers={servers!r} and "
            f"host={host}"
        )
    if dedicated and ranks is not None and len(ranks) == size:
        raise InvalidArgumentError(
            f"dedicated=True needs at least {size + 1} ranks, {size} to serve and the "
            f"others to train; got {size}"
        )
    return ranks[0] if ranks else host, ranks


def _ranks(servers: Any, size: int) -> tuple[int, ...] | None:
    if servers is None or (isinstance(servers, str) and servers == AUTO):
        return None
    if isinstance(servers, str):
        raise InvalidArgumentError(
            f"servers must be {AUTO!r}, a rank or several ranks, got {servers!r}"
        )
    listed = list(servers) if isinstance(servers, Iterable) else [servers]
    ranks = tuple(rank_number(each, size, "each of servers") for each in listed)
    if not ranks or len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(
            f"servers must be at least one rank, each named once, got {servers!r}"
        )
    return ranks


def check_nodes(servers: Sequence[int] | None, group: Group) -> None:
    """Check that several servers are on different nodes. Collective."""
    if servers is None or len(servers) == 1:
        return
    for ranks in group.nodes:
        if len(shared := [rank for rank in servers if rank in ranks]) > 1:
            # Collective; all ranks find the same pair.
            names = group.allgather(MPI.Get_processor_name(), "servers")
            raise InvalidArgumentError(
                f"servers must be on different nodes: ranks {shared[0]} and "
                f"{shared[1]} share node {names[shared[0]]}"
            )


def spread(host: int, group: Group, nbytes: int, *, divisible: bool) -> tuple[int, ...]:
    """Return the servers for "auto". Collective.

    The host, and the first rank of each other node if the variables are large, and
    ``divisible``: a server can update any elements of them.
    """
    if nbytes < LARGE or not divisible:
        return (host,)
    others = [ranks[0] for ranks in group.nodes if host not in ranks]
    return (host, *others)
