"""The base class of optimizers whose updates run on a parameter server."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import wire_format
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.mpi import group_of
from hpcaccum.optimizers.base import ExchangeKind, Optimizer, with_factor
from hpcaccum.optimizers.checks import (
    Loss,
    Pairs,
    PairsLike,
    Variables,
    capacities,
    check_pairs,
    check_sparse,
    check_variables,
    declared,
    exchanged_weight,
    listed,
)
from hpcaccum.optimizers.served import (
    Served,
    assign,
    divided,
    fragments_of,
    paused,
    read,
)
from hpcaccum.optimizers.slices import exchanged
from hpcaccum.optimizers.snapshot import Parts, check_snapshot, set_values, together
from hpcaccum.optimizers.start import warn_of_wider
from hpcaccum.optimizers.variable import Variable
from hpcaccum.optimizers.wrapper import Wrapper, one_thread
from hpcaccum.rows import RowPlace
from hpcaccum.server import (
    BoundedStalenessInbox,
    Factors,
    Inbox,
    ParameterServer,
    QuorumInbox,
    ServerOptions,
    ServerSetup,
    check_nodes,
    spread,
)

logger = logging.getLogger("hpcaccum")


class OneSidedOptimizer(Wrapper):
    """An optimizer whose updates run on the parameters of one rank. Collective.

    The host rank keeps a copy of the variables in CPU memory, the center, and the inner
    optimizer updates it there. Every rank pulls the center into its own variables,
    which may be on a device. Ranks call `compute_gradients` and `apply_gradients`
    independently of each other.

    If all ranks share a node, the inner optimizer is an `elementwise` rule, and all
    variables have one dtype that is not half precision, ranks that wait for an update
    help to compute it. The center and its slots are then in shared memory.

    Variables may have different dtypes, but gradients and parameters are sent in the
    widest of them; a warning then lists the variables of that dtype.

    For a variable with ``sparse=True``, only the rows of gradients are sent, updated
    and pulled. This needs one server, and an inner optimizer that changes no other
    rows: a rule of this package, or a torch optimizer that `hpcaccum.torch` accepts.

    After the program has given a variable another value, all ranks must call `assign`:
    otherwise the next pull replaces it, without an error; of a sparse variable, it
    replaces only rows that updates have changed.

    Args:
        opt: Makes the updates; a local optimizer.
        name: Name of this optimizer.
        check: Checks the options of this rank, given the number of ranks that train;
            returns those that must be the same on all ranks, by name.
        options: The following ones, which all one-sided optimizers have.
        outer: Updates the center in place of ``opt``, which then makes local steps.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank that holds the center.
        dedicated: Whether servers only serve; they then call `serve` after
            `initialize`. Otherwise they serve in threads while their ranks train.
        servers: The ranks that hold the center, each a part of it, and update it: one
            rank, or several on different nodes, of which the first is the host. "auto"
            uses one rank of each node if the variables have 1 MiB or more and none is
            sparse, the inner optimizer is `elementwise`, and servers also train;
            otherwise only the host, as None does. Several servers share the traffic,
            the memory and the work of updates, but each update waits for all of them.
        on_nonfinite: What happens to gradients with a NaN or an infinity: "accept"
            sends them, "drop" drops all gradients of the call on this rank, "raise"
            raises InvalidArgumentError on this rank.
        min_workers: Fewest ranks that train on after others are lost; if fewer remain,
            all raise LostRankError. Ranks that leave are not lost.
        wire_dtype: A narrower dtype, such as ``"bfloat16"``, in which sums of gradients
            and parameters are sent between nodes, rounded once on each way. The center
            and `snapshot` are not rounded; ranks on other nodes than the server's, or
            on all if there are several servers, have rounded parameters. Vectors of up
            to 8 KiB, rows, and parameters beside sparse ones are sent as they are.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
    """

    exchange = ExchangeKind.ONE_SIDED

    # The variables, once there are any; several groups if it pushes fragments.
    _served: Sequence[Served] = ()
    _fragments = 1
    # Least number of gradients in an update.
    _quorum: int | None = None
    # Maximum number of gradients of a rank in one update.
    _share = 1
    # Whether an update is a weighted mean; if not, a weight multiplies the gradient.
    _averages = False
    # Whether ranks make local steps, and push what has come of them.
    _is_local = False
    # The options that others do not have.
    _own: tuple[str, ...] = ()

    def __init__(
        self,
        opt: Optimizer,
        name: str,
        check: Callable[[int], Mapping[str, Any]],
        options: ServerOptions,
        outer: Optimizer | None = None,
    ) -> None:
        group = group_of(options.comm)

        def check_all() -> dict[str, Any]:
            facts = options.facts(group.size)
            own = check(facts["workers"])
            self._own = tuple(own)
            return {"optimizer": opt, **facts, **own}

        super().__init__(opt, name, group, check_all, options.on_nonfinite)
        self.outer = opt if outer is None else outer
        self._root: int = self._options["host"]
        self._place = options
        # None if they depend on the variables.
        self._servers: tuple[int, ...] | None = self._options["servers"]
        check_nodes(self._servers, group)
        self._workers: int = self._options["workers"]
        # Without a quorum, each gradient is an update if its lag is not larger.
        most = self._options.get("staleness")
        self._max_lag: float = math.inf if most is None else most
        # What multiplies late gradients. With a quorum, only one step late is accepted.
        self._factors: Factors | None = self._options.get("lateness")

    def __repr__(self) -> str:
        """Show the options of this strategy and the servers, also those by default."""
        options = {name: self._options[name] for name in self._own}
        options |= {
            "servers": self._place.servers,
            "wire_dtype": self._options["wire_dtype"],
            "name": self.get_name(),
        }
        shown = [f"{k}={v!r}" for k, v in options.items() if v is not None]
        return f"{type(self).__name__}({', '.join([repr(self.inner), *shown])})"

    def _make_inbox(
        self, what: str, size: int, dtype: np.dtype[Any], rows: Sequence[RowPlace]
    ) -> Inbox:
        here = self._group, self._root, size, dtype
        workers, factors = self._workers, self._factors
        if self._quorum is not None:
            late = 0.0 if factors is None else factors(1)
            return QuorumInbox(*here, self._quorum, workers, rows, what, late)
        return BoundedStalenessInbox(
            *here, max_lag=self._max_lag, workers=workers, factors=factors, what=what
        )

    def initialize(self, var_list: Variables | None) -> None:
        """Set the center and all ranks' variables to the host rank's. Collective.

        The first `compute_gradients` calls it if the user does not. A second call has
        no effect, and must pass the same variables, or None.

        Raises:
            TypeError, InvalidArgumentError, DisagreementError: On every rank, if
                ``var_list`` does not contain variables, they differ between ranks, or
                one is sparse and this optimizer cannot send its rows.
        """
        self._check_open()
        if self._served:
            self._check_known([] if var_list is None else check_variables(var_list))
            return
        variables = self._group.agree(
            self._call("initialize"), lambda: self._check_start(var_list), declared
        )
        self._start_server(variables, {}, None)

    def _start_server(
        self,
        variables: list[Variable],
        counts: Mapping[str, Any],
        states: Mapping[str, Parts] | None,
    ) -> None:
        """Start a server, also from the counts and states of a snapshot. Collective."""
        self._start(variables)
        self._begin_at(counts.get("step", 0))
        if (servers := self._servers) is None:
            nbytes = sum(var.value.nbytes for var in variables)
            divisible = self.outer.elementwise and not any(v.sparse for v in variables)
            servers = spread(self._root, self._group, nbytes, divisible=divisible)
        place = self._place = dataclasses.replace(self._place, servers=servers)
        if self._group.rank == 0:
            warn_of_wider(self.get_name(), variables)
            logger.info("%r", self)
        # Without slots: it computes gradients of these, but updates the center's.
        Optimizer.initialize(self.inner, variables)
        count, begins = self._fragments, divided(counts, self._fragments)
        for number, fragment in enumerate(fragments_of(variables, count)):
            outer = self._outer_of(fragment)
            setup = ServerSetup(
                self._group,
                {var.name: var.value for var in fragment},
                self._make_inbox,
                place,
                self.get_name() + f", fragment {number}" * (count > 1),
                outer.elementwise,
                capacities(fragment, self._share),
                **begins[number],
            )
            served = Served(setup, outer)
            for earlier in self._served:
                earlier.server.leave_with(served.server)
            self._served = (*self._served, served)
            served.start(self._call("initialize"), states)
        # No rank may train before all have the same variables.
        self._group.allgather(None, self._call("initialize"))

    def _outer_of(self, fragment: Sequence[Variable]) -> Optimizer:
        return self.outer if self._fragments == 1 else self.outer._fragment(fragment)

    def _check_snapshot(self, snapshot: Any, variables: list[Variable]) -> None:
        check_snapshot(snapshot, variables)
        for fragment in fragments_of(variables, self._fragments):
            parts = {
                part: {v.name: snapshot[part].get(v.name, {}) for v in fragment}
                for part in ("variables", "state")
            }
            self._outer_of(fragment)._kept_state(fragment).check({**snapshot, **parts})

    def _check_start(self, var_list: Any) -> list[Variable]:
        variables = super()._check_start(var_list)
        needs = self.outer._needs_for_rows()
        check_sparse(self.get_name(), variables, self._servers, needs)
        layout = Layout.of({var.name: var.value for var in variables})
        wire_format(self._options["wire_dtype"], layout.dtype)
        return variables

    def _training(self) -> Sequence[Served]:
        served = self._open()
        if served[0].server.only_serves:
            raise InvalidArgumentError(
                f"rank {self._group.rank} is a dedicated server of {self.get_name()} "
                f"and does not train: call serve()"
            )
        return served

    def serve(self, after_update: Callable[[int], object] | None = None) -> None:
        """Serve until all other ranks have left; servers of ``dedicated=True`` only.

        On return, this rank's variables are those of the final center.

        Args:
            after_update: Called on the host rank with the step after each update; the
                next one waits for it. It may call `snapshot`.

        Raises:
            InvalidArgumentError: On a rank that trains.
            BrokenObjectError: If an exception has ended an earlier call in the middle
                of an update. After one in a wait, such as Ctrl-C, or in
                ``after_update``, the next call goes on.
        """
        served = self._open()[0]
        served.server.serve(after_update)
        while served.server.is_suspended:
            self._assign()
            served.server.serve(after_update)
        served.pull_all()

    @property
    def _local_step(self) -> int:
        """The step of the parameters that this rank's gradients were computed with."""
        return self._served[0].step

    @one_thread
    def gradient_arrays(self) -> dict[str, Array]:
        """Return arrays in which a loss can compute its next gradients, by name.

        They are this rank's buffer on the server: gradients written to them are sent
        without a copy. Their dtype is that in which gradients are added: float32 for
        half precision. After `apply_gradients` they are read-only; call this method
        again. For variables on a device they are device memory. Those of `AGNOptimizer`
        and `LocalStepsOptimizer` are arrays like the variables, which are not sent.

        Raises:
            InvalidArgumentError: Before `initialize`, or on a dedicated server.
        """
        server = self._training()[0].server
        if server.on_device or self._is_local:
            return Optimizer.gradient_arrays(self)
        return server.gradient_arrays()

    def _prepare(self, var_list: Variables | None) -> Variables | None:
        """Initialize if necessary; return the variables to compute gradients of."""
        var_list = listed(var_list)
        if not self._served or var_list is not None:
            self.initialize(var_list)
        self._training()
        return self._variables if var_list is None else var_list

    @one_thread
    def compute_gradients(
        self, loss: Loss, var_list: Variables | None = None, *args: Any, **kwargs: Any
    ) -> Pairs:
        """Pull the newest parameters of this node, then compute the gradients.

        This call waits only if a gradient computed with these would certainly be
        dropped: the node gets newer ones first. Within a millisecond after it received
        parameters that this rank waited for, it does not ask for the step.

        Raises:
            InvalidArgumentError, TypeError: On this rank, as
                `Optimizer.compute_gradients`; or on a dedicated server.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; says what is missing.
        """
        variables = self._prepare(var_list)
        served = self._open()[0]
        step = served.server.inbox.useful(served.server.recent_step)
        served.useful = max(served.useful, step)
        served.pull()
        return self.inner.compute_gradients(loss, variables, *args, **kwargs)

    @one_thread
    def apply_gradients(
        self,
        grads_and_vars: PairsLike,
        global_step: Variable | None = None,
        name: str | None = None,
        *,
        weight: float = 1.0,
    ) -> Receipt:
        """Send the gradients to the host rank; wait as the optimizer promises.

        `AGNOptimizer` and `LocalStepsOptimizer` make a local step; they send at the end
        of a period.

        Args:
            grads_and_vars: Pairs as `compute_gradients` returns them. A variable with
                a gradient of None is not updated. The gradient of a sparse variable is
                an `IndexedSlices`. That of another one is sent as an array, with which
                the inner optimizer updates all rows.
            global_step: An integer Variable, set to the number of updates that this
                rank's variables contain. At the end, `free` sets it on all ranks.
            name: Ignored.
            weight: What the gradients count, such as the number of samples in their
                batch. An update of `SyncReplicasOptimizer` uses
                sum(weight * gradient) / sum(weight), one of other optimizers
                weight * gradient.

        Returns:
            Whether the gradients were accepted, and at which step. After a local step
            that sent nothing, a receipt that is not `sent`, of the last pull.

        Raises:
            InvalidArgumentError, TypeError: On this rank, also if it has left, or the
                weight is not a finite number above 0; nothing is sent.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds; says what the update waits
                for. The gradients may have been accepted.
        """
        pairs, weight = check_pairs(grads_and_vars), exchanged_weight(weight)
        if weight != 1 and not self._averages:
            pairs, weight = with_factor(pairs, weight), 1.0
        counter = self._checked_step(global_step)
        variables = [var for _, var in pairs]
        if not self._served:
            self._begin_with(variables)
        served = self._training()
        self._check_known(variables)
        served[0].server.inbox.membership.check_present()
        receipt = self._drop() if self._drops(pairs) else self._send(pairs, weight)
        if receipt.sent:
            if counter is not None:
                counter.value[...] = sum([each.step for each in served])
            self._note(receipt)
        return receipt

    def _begin_with(self, variables: list[Variable]) -> None:
        """Initialize before the first gradients, which are those of these variables."""
        self.initialize(variables)

    def _drop(self) -> Receipt:
        served = self._served[0]
        receipt = served.server.drop(self._local_step)
        if not self._is_local:
            served.pull()
        return receipt

    def _send(self, pairs: Pairs, weight: float) -> Receipt:
        served = self._served[0]
        grads = exchanged(pairs, served.server.gradient_arrays)
        receipt = served.server.push(grads, self._local_step, weight)
        self._after(served, receipt)
        return receipt

    def _bound(self) -> str:
        if self._quorum is not None:
            late = "a step before the last" if self._factors else "an earlier step"
            return f"a gradient of {late} is not accepted"
        return f"staleness={self._max_lag} is the largest lag accepted"

    def _after(self, served: Served, receipt: Receipt) -> None:
        """Pull after a push."""
        served.after(receipt)

    def restore(self, snapshot: Any, var_list: Variables | None = None) -> None:
        """Begin with a snapshot instead of the host's variables. Collective.

        Call it instead of `initialize`, or later: then the server ends, and a new one
        starts. The ranks, nodes and servers may differ from those of the snapshot.

        Args:
            snapshot: On the host rank; others may pass None.
            var_list: As for `initialize`; not needed if it is initialized.

        Raises:
            TypeError, InvalidArgumentError, DisagreementError: On every rank, if the
                snapshot does not fit; nothing is changed.
            WaitTimeoutError: If the server does not end in time; see `free`.
        """
        host = self._group.rank == self._root
        variables, counts = self._agree_on_snapshot(snapshot, var_list, host, declared)
        if self._served:
            self._end_server()
        if host:
            set_values(variables, snapshot)
        states = snapshot["state"] if host else {}
        self._start_server(variables, counts[self._root], states)

    @one_thread
    def assign(self) -> None:
        """Set the center to the host's variables, between two updates. Collective.

        All ranks call it, including those that have left, after the host has changed
        the values of its variables. Afterwards the variables of all ranks have these
        values. If the host only serves, the values are those of the first rank that
        trains; a dedicated server in `serve` takes part without a call, after the
        updates of all gradients that were accepted, even if they are fewer than a
        quorum.

        Slots, the step and the counts do not change. No gradient is lost: one that was
        accepted before, and is not applied yet, changes the new values. One that a rank
        computed before, and sends later, counts as computed with the new values; so do
        the gradients that AGN has added up since its last push. Local steps of
        `LocalStepsOptimizer` since its last push are undone.

        Raises:
            InvalidArgumentError: Before `initialize`; on every rank, in a block of
                `paused`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if an update does not end,
                or a rank does not call it.
        """
        for served in self._open():
            served.server.suspend()
        self._assign()

    def _assign(self) -> None:
        what, variables = self._call("assign"), check_variables(self._variables)
        assign(self._group, self._served, variables, what, self.before_assign)

    # Questions, on every rank

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot of this rank's variable or, on the host rank, of the center's.

        A slot of the center is a copy, taken between two updates. Use `paused` to read
        several of the same step.
        """
        own = self.inner.get_slot(var, name)
        found = [each for each in self._served if var.name in each.values]
        if own is not None or not found or not found[0].server.is_root:
            return own
        return found[0].slot(var, name)

    def paused(self) -> AbstractContextManager[int]:
        """Suspend updates during the block; on the host rank only. Not collective.

        ``with opt.paused() as step:`` waits for the update in progress. `center`,
        `get_slot` and `variables` return the values of ``step`` until the block ends.
        Meanwhile all ranks wait for their updates, so keep the block short.

        Raises:
            InvalidArgumentError: On other ranks, which hold no slots. In the block, for
                a call of this thread that would wait for an update.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if an update does not end.
        """
        return paused(self._any())

    def _any(self) -> Sequence[Served]:
        """Return what has a server; a freed one still answers questions."""
        return self._initialized(self._served or None)

    def _open(self) -> Sequence[Served]:
        self._check_open()
        return self._any()

    @property
    def _server(self) -> ParameterServer:
        """The server of all variables, or of the first fragment."""
        return self._any()[0].server

    def snapshot(self) -> dict[str, Any]:
        """Return copies of the center and of its state, all of one step.

        On the host rank only, between two updates; other ranks go on. Also after
        `free`.

        Returns:
            As `Optimizer.snapshot`; and "global_step", the number of updates, and
            "tally", the `statistics` as lists. These may count gradients whose update
            is not yet made: it is not part of the snapshot, nor are gradients that a
            rank has not yet pushed, the sums of AGN, or local steps.

        Raises:
            InvalidArgumentError: On other ranks, or before `initialize`.
            WaitTimeoutError: After HPCACCUM_TIMEOUT seconds, if an update does not end.
        """
        served = self._any()
        with paused(served):
            return together([each.snapshot() for each in served])

    @property
    def _exchanges(self) -> Sequence[ParameterServer]:
        return [each.server for each in self._served]

    def _read(self, names: Sequence[str]) -> list[Array]:
        return read(self._any(), names)

    def leave(self) -> None:
        """Declare that this rank contributes no more gradients. Not collective.

        Other ranks stop waiting for it; quorums shrink. First it waits for the updates
        of pushes of `LocalStepsOptimizer` that ``overlap`` with local steps.

        Raises:
            WaitTimeoutError: If these updates take too long, or it is not known yet
                whether this rank's last gradient was accepted, because the answer is
                late. The rank has not left then, and may call this again.
        """
        for served in self._open():
            served.server.leave()

    @property
    def freed(self) -> bool:
        """Whether it was freed, by `free` or with its server before MPI_Finalize."""
        return self._freed or (bool(self._served) and self._served[0].server.freed)

    def _free(self) -> None:
        if self._served:
            if self._server.has_to_serve:
                self.serve()
            # The end of a program frees the server only: no call may come after this.
            self._server.note = tuple(self._steps)
            for served in self._served:
                served.server.free()
            self._end_steps(self._server.notes)
        for served in self._served:
            served.keep()
        super()._free()

    def _end_server(self) -> None:
        """Free the server and what belongs to it. Collective."""
        for served in self._open():
            served.server.free()
            served.forget()
        self._served = ()
