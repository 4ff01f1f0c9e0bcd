"""What the optimizers have in common whose updates run on a parameter server."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from hpcaccum.arguments import rank_number
from hpcaccum.device import all_on_device, release
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import (
    Exchange,
    Optimizer,
    check_global_step,
    check_pairs,
    check_variables,
    listed,
    set_global_step,
)
from hpcaccum.optimizers.start import check_floats, warn_of_wider
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import Wrapper
from hpcaccum.server import ParameterServer, gradients_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.accumulator import Receipt, Tally
    from hpcaccum.optimizers.base import Loss
    from hpcaccum.server import Inbox

Array = np.ndarray[Any, Any]


class OneSidedOptimizer(Wrapper):
    """An optimizer whose inner one runs on the host's parameters. Collective.

    The host's copy of the variables, the center, is updated there, in host memory;
    every rank pulls it into its own variables, which may be on a device. Ranks call
    `compute_gradients` and `apply_gradients` when they want to.

    Variables of several dtypes may go together, but gradients and parameters travel in
    the widest of their dtypes; a warning then says which variables have it.

    Args:
        opt: The optimizer that makes the updates; a local one.
        name: Of this optimizer.
        options: Name to check of what must be the same on all ranks.
        comm, host: The ranks, and which of them holds the center.
        dedicated: Whether the host only serves; it then calls `serve` after
            `initialize`. Otherwise it serves in a thread beside its own training.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
    """

    exchange = Exchange.ONE_SIDED

    def __init__(
        self,
        opt: Optimizer,
        name: str,
        options: Mapping[str, Callable[[], object]],
        *,
        comm: mpi4py_MPI.Comm | Group | None,
        host: int,
        dedicated: bool,
    ) -> None:
        group = Group.of(comm)

        def facts() -> dict[str, object]:
            Wrapper.__init__(self, opt, name)
            if dedicated and group.size == 1:
                raise InvalidArgumentError(
                    "dedicated=True needs 2 ranks, one serves and others train; got 1"
                )
            return {
                "optimizer": opt,
                "host": rank_number(host, group.size, "host"),
                "dedicated": bool(dedicated),
                **{option: check() for option, check in options.items()},
            }

        group.agree(type(self).__name__, facts)
        self._group, self._host, self._dedicated = group, host, dedicated
        self._server: ParameterServer | None = None
        self._local: dict[str, Array] = {}
        self._center: dict[str, Variable] = {}
        # The step of this rank's variables, and the least one that is of use next.
        self._step, self._useful = -1, 0

    @property
    def _workers(self) -> int:
        return self._group.size - bool(self._dedicated)

    def _make_inbox(self, size: int, dtype: np.dtype[Any]) -> Inbox:
        """Return the inbox that makes the difference between the optimizers."""
        raise NotImplementedError

    def initialize(self, var_list: Any) -> None:
        """Set the center to the host's variables, and all ranks' to it. Collective.

        Done by the first `compute_gradients` otherwise. Again, it must be given the
        same variables and does nothing.

        Raises:
            TypeError, InvalidArgumentError, DisagreementError: On every rank, for
                something else than variables, or different ones on different ranks.
        """
        self._check_open()
        if self._server is not None:
            self._check_known(var_list)
            return
        checked: list[Variable] = []

        def facts() -> dict[str, object]:
            checked.extend(check_variables(var_list))
            check_floats(checked)
            all_on_device("variables", [var.value for var in checked])
            self._check_usable(checked)
            return {"variables": [(v.name, v.shape, str(v.dtype)) for v in checked]}

        self._group.agree(f"{self.get_name()}: initialize", facts)
        if self._group.rank == 0:
            warn_of_wider(self.get_name(), checked)
        super().initialize(checked)
        self._local = {var.name: var.value for var in checked}
        self._server = ParameterServer(
            self._group,
            self._host,
            self._local,
            self._make_inbox,
            dedicated=self._dedicated,
            what=self.get_name(),
            finish=self._finish,
        )
        if self._server.is_root:
            self._serve_with(self._server)
        self._pull()
        # Nobody trains before all have the same variables.
        self._group.allgather(None, f"{self.get_name()}: initialize")

    def _check_usable(self, variables: list[Variable]) -> None:
        """Refuse variables that this optimizer cannot have."""

    def _check_known(self, var_list: Any) -> None:
        for var in [] if var_list is None else check_variables(var_list):
            if self._local.get(var.name) is not var.value:
                raise InvalidArgumentError(
                    f"{self.get_name()} was initialized without this variable "
                    f"{var.name!r}, with {sorted(self._local)}"
                )

    def _serve_with(self, server: ParameterServer) -> None:
        center = self._center = {
            name: Variable(array, name) for name, array in server.center.items()
        }
        self.inner.initialize(list(center.values()))

        def update(grads: dict[str, Array]) -> None:
            self.inner.apply_gradients([(g, center[name]) for name, g in grads.items()])

        server.start(update)

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot of this rank's variable, else on the host of the center's.

        One of the center's is a copy of one step. To read several of the same step, see
        `paused`.
        """
        own = self.inner.get_slot(var, name)
        if own is not None or var.name not in self._center:
            return own
        with self.paused():
            slot = self.inner.get_slot(self._center[var.name], name)
            return None if slot is None else slot.copy()

    @contextlib.contextmanager
    def paused(self) -> Iterator[int]:
        """Make no update while the block runs, whose reads are of one step; host only.

        ``with opt.paused() as step:`` waits for the update that is being made. Then
        `center`, `get_slot` and `variables` are those of ``step`` until the block ends.
        All ranks wait for their updates meanwhile, so copy and leave. Not collective.

        Raises:
            InvalidArgumentError: On other ranks, which hold no slots. In the block, for
                a call of this thread that would wait for an update.
        """
        with self._asked().paused() as step:
            yield step

    def _asked(self) -> ParameterServer:
        """Return the server, which may have been freed, to ask it something."""
        if self._server is None:
            self._check_open()
            raise InvalidArgumentError(
                f"{self.get_name()} has no variables yet: call initialize(var_list) on "
                f"all ranks"
            )
        return self._server

    def _opened(self) -> ParameterServer:
        self._check_open()
        return self._asked()

    def _training(self) -> ParameterServer:
        server = self._opened()
        if server.only_serves:
            raise InvalidArgumentError(
                f"rank {self._host} is the dedicated host of {self.get_name()} and "
                f"does not train: call serve()"
            )
        return server

    def serve(self) -> None:
        """Serve until all other ranks have left; on the host of ``dedicated=True``.

        In the end this rank's variables are those of the final center.
        """
        self._opened().serve()
        self._pull_all()

    @property
    def _local_step(self) -> int:
        """The step that this rank's gradients are said to be computed at."""
        return self._step

    def _pull(self, into: Mapping[str, Array] | None = None) -> None:
        """Bring the newest center into this rank's variables."""
        self._step = self._opened().pull(
            self._local if into is None else into,
            at_least=self._useful,
            known=self._step if into is None else -1,
        )

    def _pull_all(self) -> None:
        """Make this rank's variables the center's, whatever they were."""
        self._step = self._opened().pull(self._local)

    def _finish(self) -> None:
        # The server makes no more updates, which may ask for the step.
        self._pull_all()
        self._freed = True

    def gradient_arrays(self) -> dict[str, Array]:
        """Return memory in which a loss can compute its next gradients, by name.

        It is this rank's slot on the host: gradients that lie there are sent without a
        copy. They are of the dtype in which gradients are added, for half precision
        float32. After `apply_gradients` it is no longer the loss's: ask again. For
        variables on a device it is memory there.

        Raises:
            InvalidArgumentError: Before `initialize`.
        """
        server = self._training()
        if all_on_device("variables", self._local.values()):
            return Optimizer.gradient_arrays(self)
        return server.gradient_arrays()

    def compute_gradients(
        self, loss: Loss, var_list: Any = None, *args: Any, **kwargs: Any
    ) -> list[tuple[Array | None, Variable]]:
        """Pull the newest parameters, then compute the gradients with them.

        Waits only if every gradient computed now were certain to be dropped.
        """
        var_list = listed(var_list)
        if self._server is None or var_list is not None:
            self.initialize(var_list)
        self._training()
        self._pull()
        variables = self._variables if var_list is None else var_list
        return self.inner.compute_gradients(loss, variables, *args, **kwargs)

    def apply_gradients(
        self,
        grads_and_vars: Any,
        global_step: Variable | None = None,
        name: str | None = None,
    ) -> Receipt | None:
        """Send the gradients to the host; wait for what the optimizer promises.

        Args:
            grads_and_vars: Pairs as `compute_gradients` gives them. A gradient of None
                leaves its variable alone.
            global_step: An integer Variable, set to the number of updates that this
                rank's variables have.
            name: Ignored.

        Returns:
            What became of the gradients.

        Raises:
            InvalidArgumentError, TypeError: On this rank; nothing is sent.
        """
        pairs = check_pairs(grads_and_vars)
        check_global_step(global_step)
        self.initialize([var for _, var in pairs])
        server = self._training()
        receipt = server.push(gradients_by_name(pairs), self._local_step)
        self._after(server, receipt)
        set_global_step(global_step, self._step)
        return receipt

    def _after(self, server: ParameterServer, receipt: Receipt) -> None:
        """Get new parameters after a push: with its update, or at once if dropped."""
        if receipt:
            self._useful = receipt.global_step + 1
            self._pull()
        else:
            self._pull()
            self._useful = server.missed(receipt)

    @property
    def global_step(self) -> int:
        """The number of updates that the center has now, or had in the end."""
        return self._asked().step

    @property
    def waited(self) -> float:
        """Seconds that this rank has waited for others."""
        return 0.0 if self._server is None else self._server.waited

    @overload
    def center(self, var: Variable) -> Array: ...
    @overload
    def center(self, var: Sequence[Variable]) -> list[Array]: ...
    def center(self, var: Variable | Sequence[Variable]) -> Array | list[Array]:
        """Return a copy of the host's current value of a variable; not collective.

        Args:
            var: A variable; or a list or tuple of them, whose copies are of one step.

        Returns:
            An array in host memory; for a list, a list of them. After `free`, the
            values of the last update.
        """
        server = self._asked()
        several = isinstance(var, (list, tuple))
        variables: Any = var if several else [var]
        self._check_known(variables)
        copies = server.read([each.name for each in variables])
        return copies if several else copies[0]

    def statistics(self) -> Tally:
        """Return what happened to the gradients of all ranks, so far or in all."""
        return self._asked().tally()

    def leave(self) -> None:
        """Say that this rank brings no more gradients. Not collective.

        Nobody waits for it any more; quorums shrink.
        """
        self._opened().leave()

    def free(self) -> None:
        """Leave, wait until all ranks have, and end with the final center. Collective.

        Afterwards the variables of all ranks are those of the last update, also of
        ranks that left early or only served. `center`, `global_step`, `statistics` and
        `get_slot` go on telling of it.
        """
        if self._server is not None:
            self._server.free()
        super().free()
        release(self._gradients)
