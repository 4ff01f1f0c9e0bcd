"""Words on the node of one rank, for the ranks of all nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import AtomicWords, Group, memory_barrier
from hpcaccum.nodes.calls import Calls

# The words in front of others that say whether an object is in use: more would clear
# the caches of a core.
_WATCHED = 16


def words_of(group: Group, root: int, count: int, what: str = "words") -> AtomicWords:
    """Return ``count`` words on the node of the rank ``root``. Collective.

    Its ranks load and store them. For a rank of another node each operation is a
    message to the agent of that node, and its answer; ``what`` begins messages.

    Raises:
        InvalidArgumentError: On every rank, if there is too little memory, or if MPI
            provides no THREAD_MULTIPLE between nodes.
        RuntimeError: On every rank, if MPI can make no more windows.
    """
    if group.single_node:
        return AtomicWords(group, root, count)
    # All take part in it at its first use.
    inside, words, failure = group.inside, None, None
    if root in group.node_ranks:
        try:
            words = _ServedWords(group, inside, root, count)
        except (InvalidArgumentError, RuntimeError) as error:
            failure = error
    group.raise_together("allocating a window", failure)
    if words is None:
        return _RemoteWords(group, root, what)
    words.serve(what)
    return words


class _ServedWords(AtomicWords):
    """Words on this node, which other nodes use, too."""

    def __init__(self, group: Group, inside: Group, root: int, count: int) -> None:
        super().__init__(inside, group.node_ranks.index(root), count)
        self.root, self._group = root, group
        self._end_watch: Callable[[], None] | None = None

    def serve(self, what: str) -> None:
        """Begin to carry out operations of other nodes."""
        self._calls = Calls(self._group, self.root, self._serve, what)
        if self._calls.leads:
            progress = self._group.progress
            self._end_watch = progress.watch(lambda: self.memory[:_WATCHED])

    def _serve(self, _: int, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def free(self) -> None:
        self._calls.free()
        if self._end_watch is not None:
            self._end_watch()
        super().free()


class _RemoteWords(AtomicWords):
    """Words on another node: its agent carries out each operation."""

    direct = False

    def __init__(self, group: Group, root: int, what: str) -> None:
        self.root = root
        self.sync = memory_barrier()
        self._calls = Calls(group, root, lambda *_: None, what)

    def _call(self, name: str, *arguments: Any) -> Any:
        # As that of `AtomicWords`: before a store, and after a load.
        self.sync()
        found = self._calls.call(name, *arguments)
        self.sync()
        return found

    read: Any = partialmethod(_call, "read")
    read_range: Any = partialmethod(_call, "read_range")
    write: Any = partialmethod(_call, "write")
    store: Any = partialmethod(_call, "store")
    store_unordered: Any = partialmethod(_call, "write")
    fetch_add: Any = partialmethod(_call, "fetch_add")
    exchange: Any = partialmethod(_call, "exchange")
    compare_and_swap: Any = partialmethod(_call, "compare_and_swap")

    def free(self) -> None:
        self._calls.free()
