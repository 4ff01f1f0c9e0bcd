"""The role of a rank in a parameter server: the base of the loops that make updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum.deadline import Deadline
    from hpcaccum.dtypes import Array

    # Changes the center. Gets gradients by name, arrays or `IndexedSlices`; and a
    # learning rate, or None for the optimizer's own.
    Update = Callable[[dict[str, Any], float | None], object]
    Rate = Callable[[], float | None]
    Answer = Callable[[Any], Any]


class Role:
    """What a rank does as a server, for its `ParameterServer`; here nothing.

    Ranks that are no servers have this one, others a subclass. A single server has an
    `UpdateLoop`. If there are several, the root has an `OrderLoop`, which has a
    `ShardLoop` for its own part; the others have a `ShardLoop`.

    Attributes:
        center, slots: See `ParameterServer`.
        after_update: Called on the root with the step after each update, before the
            next one.
    """

    after_update: Callable[[int], object] | None = None

    def __init__(self) -> None:
        self.center: dict[str, Array] = {}
        self.slots: dict[str, dict[str, Array]] | None = None

    def set_step(self, step: int) -> None:
        """Publish the center as that of a step, before any rank pushes or pulls."""

    def set_optimizer(self, update: Update, rate: Rate, answer: Answer) -> None:
        """Set what makes updates, before they begin; see `ParameterServer.start`."""

    def start_thread(self) -> None:
        """Call `run` in a thread, unless there is one."""

    def run(self) -> None:
        """Serve until all ranks have left. Goes on if an exception has ended a wait."""

    def come_back(self) -> None:
        """Let `run`, which has ended, serve again."""

    def keep(self, values: Mapping[str, Array]) -> None:
        """Keep what will be assigned; on each server."""

    def assign(self, deadline: Deadline) -> int:
        """Set the center to what was kept, between two updates; the root only.

        Returns:
            The version that has the values.
        """
        raise NotImplementedError

    def wait_for_ordered(self, deadline: Deadline) -> None:
        """Wait until the updates are made that were ordered ahead; the root only."""

    def end(self, deadline: Deadline) -> None:
        """Wait until the thread has ended, if there is one; all ranks have left by now.

        Raises:
            WaitTimeoutError: If its last updates take too long.
        """
