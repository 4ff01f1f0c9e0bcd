"""Read access to the parameter server of an optimizer, on every rank."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hpcaccum.optimizers.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpcaccum.accumulator import Tally
    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.center import Center
    from hpcaccum.optimizers.variable import Variable
    from hpcaccum.server import ParameterServer


class ServedOptimizer(Wrapper):
    """Reads from a parameter server, which its subclass makes. Collective.

    The base of `OneSidedOptimizer`.
    """

    _server: ParameterServer | None = None
    _center: Center | None = None

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot of this rank's variable or, on the host rank, of the center's.

        A slot of the center is a copy, taken between two updates. Use `paused` to read
        several of the same step.
        """
        own, center = self.inner.get_slot(var, name), self._center
        if own is not None or center is None or not self._any_server().is_root:
            return own
        return center.slot(var, name)

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Suspend updates during the block, to read one step; host rank only.

        ``with opt.paused() as step:`` waits for the update in progress. `center`,
        `get_slot` and `variables` return the values of ``step`` until the block ends.
        Meanwhile all ranks wait for their updates, so keep the block short. Not
        collective.

        Raises:
            InvalidArgumentError: On other ranks, which hold no slots. In the block, for
                a call of this thread that would wait for an update.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if an update does not end.
        """
        with self._any_server().paused() as step:
            yield step

    def _any_server(self) -> ParameterServer:
        """Return the server; a freed one still answers questions."""
        return self._initialized(self._server)

    def _open_server(self) -> ParameterServer:
        self._check_open()
        return self._any_server()

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the center and of its state, all of one step.

        On the host rank only, between two updates; other ranks go on. Also after
        `free`.

        Returns:
            As `Optimizer.snapshot`; and "global_step", the number of updates, and
            "tally", the `statistics` as lists. These may count gradients whose update
            is not yet made: it is not part of the snapshot, nor are gradients that a
            rank has not yet pushed, or the sums of AGN.

        Raises:
            InvalidArgumentError: On other ranks, or before `initialize`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if an update does not end.
        """
        self._any_server()
        assert self._center is not None
        return self._center.snapshot()

    @property
    def global_step(self) -> int:
        """Number of updates of the center so far; after `free`, in total."""
        return self._any_server().step

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for other ranks."""
        return 0.0 if self._server is None else self._server.waited

    def _reader(self) -> Callable[[Sequence[str]], list[Array]]:
        return self._any_server().read

    def statistics(self) -> Tally:
        """Return how many gradients of each rank were accepted and dropped so far."""
        return self._any_server().tally()

    def leave(self) -> None:
        """Declare that this rank contributes no more gradients. Not collective.

        Other ranks stop waiting for it; quorums shrink.

        Raises:
            WaitTimeoutError: If it is not known yet whether this rank's last gradient
                was accepted, because the answer is late. The rank has not left then,
                and may call this again.
        """
        self._open_server().leave()

    def free(self) -> None:
        """Leave, wait until all ranks have left, and pull the final center. Collective.

        Afterwards the variables of all ranks are those of the last update, also on
        ranks that left early or only served. A Variable that one rank passed as
        ``global_step`` is `global_step` on all ranks; one that did not pass it is found
        by its name. `center`, `global_step`, `statistics` and `get_slot` remain
        available. A dedicated server that has not called `serve` serves until the
        others have left.

        Raises:
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, on all ranks that wait;
                names the missing ranks. Another call on all ranks does the rest.
        """
        super().free()

    @property
    def freed(self) -> bool:
        """Whether it was freed, by `free` or with its server before MPI_Finalize."""
        return self._freed or (self._server is not None and self._server.freed)

    def _free(self) -> None:
        if self._server is not None:
            # The end of a program frees the server only: no call may come after this.
            self._server.note = tuple(self._steps)
            self._server.free()
            self._end_steps(self._server.notes)
        if self._center is not None:
            self._center.free()
        super()._free()
