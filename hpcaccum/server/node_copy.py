"""Parameters as the ranks of one node read them."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from hpcaccum.nodes import Change

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array
    from hpcaccum.mpi import Group
    from hpcaccum.server.double_buffer import DoubleBuffer

# For so many seconds after a step has come, a rank does not ask for a newer one: the
# answer may be as old.
_RECENT = 1e-3
# A version is a step, and in these bits how often values have been assigned to it.
_ASSIGNED_BITS = 20


def version_of(step: int) -> int:
    """Return the first version of a step."""
    return step << _ASSIGNED_BITS


def step_of(version: int) -> int:
    """Return the step of a version."""
    return version >> _ASSIGNED_BITS


class NodeCopy:
    """Parameters as the ranks of a node read them.

    The base of `Parameters` and `ShardedParameters`, which send them to the node. What
    is published, sent and asked for are versions: a step has another one for each time
    that values are assigned between two updates.

    Args:
        copies: Those of this node.
        written_here: Whether a thread of this rank writes them.

    Attributes:
        copies: Those of this node.
        changed: Announced by this thread, after what others of this rank wait for.
    """

    def __init__(self, copies: DoubleBuffer, *, written_here: bool) -> None:
        self.copies = copies
        self.changed = Change(made_here=written_here)
        # When a step has come for which this rank waited.
        self._came = -math.inf

    def pin(self) -> None:
        """Pin the memory that `read` passes on."""
        self.copies.pin()

    @property
    def window_bytes(self) -> int:
        """Memory of this rank that holds copies."""
        return self.copies.window_bytes

    def version(self) -> int:
        """Return the step that this node has; a load. -1 before the first one."""
        return step_of(self.copies.version())

    def newest_version(self) -> int:
        """Return the newest version that a rank may have; across nodes a round trip."""
        raise NotImplementedError

    def newest(self) -> int:
        """Return the step of `newest_version`."""
        return step_of(self.newest_version())

    def recent(self) -> int:
        """Return the newest step, as of a moment ago: soon after a wait, a load."""
        if time.monotonic() - self._came < _RECENT:
            return self.version()
        return self.newest()

    def wait(
        self,
        step: int,
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
        *,
        comes: bool = False,
    ) -> None:
        """Do as `wait_for` with any version of a step."""
        self.wait_for(version_of(step), deadline, missing, meanwhile, comes=comes)

    def wait_for(
        self,
        version: int,
        deadline: Deadline,
        missing: Callable[[], str],
        meanwhile: Callable[[], None] | None = None,
        *,
        comes: bool = False,
    ) -> None:
        """Wait until this node has a version, or a newer one."""
        if not comes:
            self._ask_for(version)
        self.changed.wait(
            self.copies.has(version),
            deadline,
            lambda: self._under_way(version) or missing(),
            meanwhile,
        )
        self._came = time.monotonic()

    def complete(self, version: int) -> None:
        """Publish to this node what `copies.begin` returned the memory for."""
        self.copies.complete(version)
        self.changed.announce()

    def _ask_for(self, version: int) -> None:
        """Have a version sent to this node, unless it comes anyway."""
        raise NotImplementedError

    def _under_way(self, version: int) -> str | None:
        """Return which agents move a version; None if it is not published."""
        raise NotImplementedError

    def read(self, use: Callable[[Array], None], deadline: Deadline) -> int:
        """Let ``use`` copy what this node has; see `DoubleBuffer.read`."""
        return step_of(self.copies.read(use, deadline))


def writer_inside(group: Group, root: int) -> tuple[Group, int]:
    """Return the ranks of this node, and the one that writes its copies. Collective."""
    if group.single_node:
        return group, root
    ranks = group.node_ranks
    return group.inside, ranks.index(root) if root in ranks else 0
