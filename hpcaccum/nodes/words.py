"""Words on the node of one rank, for the ranks of all nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import AtomicWords, memory_barrier
from hpcaccum.nodes.calls import Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpcaccum.mpi import Group

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
            self._end_watch = self._group.progress.watch(self._watched)

    def _serve(self, _: int, name: str, *arguments: Any) -> Any:
        result = getattr(self, name)(*arguments)
        return True if result is None else result

    def _watched(self) -> memoryview:
        return self.memory[:_WATCHED]

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

    def read(self, index: int) -> int:
        return int(self._call("read", index))

    def fetch_add(self, index: int, value: int) -> int:
        return int(self._call("fetch_add", index, value))

    def exchange(self, index: int, value: int) -> int:
        return int(self._call("exchange", index, value))

    def compare_and_swap(self, index: int, expected: int, new: int) -> int:
        return int(self._call("compare_and_swap", index, expected, new))

    def read_range(self, index: int, count: int) -> list[int]:
        return list(self._call("read_range", index, count))

    def write(self, index: int, value: int) -> None:
        self._call("write", index, value)

    def store(self, index: int, values: Sequence[int]) -> None:
        self._call("store", index, list(map(int, values)))

    def store_unordered(self, index: int, value: int) -> None:
        self._call("write", index, value)

    def free(self) -> None:
        self._calls.free()
