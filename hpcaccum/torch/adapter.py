"""The base class of the adapters of all strategies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch

from hpcaccum.accumulator import Receipt
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.mpi import MPI, Group, group_of
from hpcaccum.optimizers import CrossShardOptimizer
from hpcaccum.optimizers.adapter import AdapterBase, ServerArguments, check_known
from hpcaccum.optimizers.one_sided import OneSidedOptimizer
from hpcaccum.torch.buffers import AVERAGE, Buffers
from hpcaccum.torch.parameters import Parameters, names_of_sparse
from hpcaccum.torch.rule import TorchRule
from hpcaccum.torch.state import check_state, snapshot_of, state_of
from hpcaccum.torch.tensors import (
    check_module,
    check_optimizer,
    named_parameters,
    numpy_name,
    stream_of,
    tensor_of,
)

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

logger = logging.getLogger("hpcaccum")

S = TypeVar("S", bound="Adapter")
P = ParamSpec("P")
R = TypeVar("R")


def in_stream(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method do its work on the device in PyTorch's order; see `stream_of`."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with stream_of(self._first):
            return method(self, *args, **kwargs)

    # Dynamo cannot compile calls of MPI, nor trace hooks that make them.
    untraced: Callable[Concatenate[S, P], R] = torch.compiler.disable(call)
    return untraced


@functools.cache
def _warn_of_no_module() -> None:
    """Warn, once in a process."""
    logger.warning(
        "hpcaccum.torch: without module=model, buffers (such as those of a batch norm) "
        "and parameters outside the optimizer (such as those of frozen layers) are not "
        "synchronized, and may differ between ranks; pass module=None if there are none"
    )


class Adapter(torch.optim.Optimizer, AdapterBase):  # type: ignore[misc]
    """Takes the place of a torch optimizer in a training loop. Collective.

    It has the parameter groups of that optimizer, so a scheduler accepts either of
    them.

    Args:
        optimizer: Of `torch.optim`.
        make: Makes the optimizer that exchanges gradients, of a rule and ``options``.
        module: The model. Its buffers, and parameters that are not trained, also start
            with the values of rank 0, and messages use its names. Pass None if there
            are no such values. If it is omitted, a warning states that they are not
            synchronized.
        buffers: ``"average"`` or ``"broadcast"``: what `sync_buffers` does.
        sparse: The parameters whose gradients are sparse.
        capacity: Maximum number of rows of such a gradient that a server gets.
        comm: Communicator of the ranks; COMM_WORLD by default.

    Attributes:
        optimizer: The torch optimizer.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank.
    """

    # The rank whose state is saved and loaded.
    _root = 0
    # Those that were made; a freed one has no parameters any more.
    _all: ClassVar[weakref.WeakSet[Adapter]] = weakref.WeakSet()
    # The optimizer whose options and state are saved.
    _saved: torch.optim.Optimizer
    # Whether `step` is being carried out, in which the optimizer may make its step.
    _steps = False
    # What the gradients of this rank count that are computed now; and those of the next
    # step, if a block or a backward pass has set it since the last one.
    _weight = 1.0
    _next_weight: float | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        make: Callable[..., CrossShardOptimizer | OneSidedOptimizer],
        *,
        module: torch.nn.Module | EllipsisType | None = ...,
        buffers: str = AVERAGE,
        comm: mpi4py_MPI.Comm | Group | None = None,
        sparse: Iterable[torch.Tensor] = (),
        capacity: int | None = None,
        wire_dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> None:
        self._group = group_of(comm)
        self._what = f"hpcaccum.torch.{type(self).__name__}"
        check_known(self._what, options, [*ServerArguments.__annotations__, "servers"])
        if module is ...:
            module = None
            if self._group.size > 1 and MPI.COMM_WORLD.rank == 0:
                _warn_of_no_module()

        def check() -> tuple[TorchRule, Buffers]:
            check_optimizer(optimizer, Adapter)
            check_module(module)
            tensors = named_parameters(optimizer, module)
            self._check_unused(tensors)
            rows = names_of_sparse(sparse, capacity, optimizer, tensors)
            rule = TorchRule(optimizer, Parameters(tensors, rows, capacity))
            return rule, Buffers(module, tensors.values(), buffers)

        self._rule, self._buffers = self._group.agree(
            self._what,
            check,
            lambda checked: {
                "sparse": checked[0].parameters.sparse,
                **checked[1].facts(),
                **self._facts(checked[0]),
            },
        )
        # The groups are the same dictionaries.
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = self._saved = optimizer
        self.state = optimizer.state
        self._parameters = self._rule.parameters
        self._first = next(iter(self._parameters.names))
        # Whether backward passes exchange gradients.
        self._syncs = True
        # Handles of the hooks of the optimizer.
        self._handles: list[Any] = []
        self._exchange = make(
            self._rule,
            name=type(self).__name__,
            comm=self._group,
            wire_dtype=numpy_name(wire_dtype),
            **options,
        )
        self._open()
        self._handles.append(optimizer.register_step_pre_hook(self._refuse))
        self._all.add(self)

    def _check_unused(self, tensors: Mapping[str, Any]) -> None:
        """Raise unless no other adapter that is open has one of these parameters."""
        for other in list(self._all):
            if other.freed:
                continue
            for name, tensor in tensors.items():
                if tensor in other._parameters.names:
                    raise InvalidArgumentError(
                        f"{name!r} belongs to another {other._what}, which updates it; "
                        f"free() that one first, or give each optimizer parameters of "
                        f"its own"
                    )

    @in_stream
    def _open(self) -> None:
        """Begin with the values of rank 0. Collective."""
        parameters = self._parameters
        self._exchange.before_assign = lambda _: parameters.reclaim()
        self._exchange.initialize(parameters.variables.values())
        self._buffers.broadcast(self._group, self._what)

    def _facts(self, rule: TorchRule) -> Mapping[str, object]:
        """Return what else must be the same on all ranks, as messages name it."""
        return {}

    @in_stream
    def step(
        self, closure: Callable[[], Any] | None = None, *, weight: float | None = None
    ) -> Receipt:
        """Exchange the gradients and update the parameters, as the strategy promises.

        Args:
            closure: Computes the gradients first and returns the loss; optional.
            weight: What the gradients of this rank count, as in `weighted`, such as the
                number of samples in its batch. With `CrossShard`, whose backward passes
                exchange gradients, it is for a ``closure``, and after `no_sync`.

        Returns:
            Whether the gradients were accepted, and at which step; with the result of
            ``closure``.

        Raises:
            InvalidArgumentError: If there is no gradient, or a gradient is sparse or
                dense when it must not be, or parameters were added to the optimizer.
                With a server also, before anything is sent, if the program has changed
                the values of a parameter: see `assign`.
        """
        loss, before = None, self._weight
        if weight is not None:
            self._weight = weight
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._rule.check_groups()
            self._parameters.reclaim()
            # Schedulers look for it where they were attached.
            self.optimizer._opt_called = True
            self._steps = True
            if weight is None:
                weight = self._next_weight
            receipt = self._update(self._weight if weight is None else weight)
            self._next_weight = None
        finally:
            self._steps, self._weight = False, before
        return receipt if loss is None else dataclasses.replace(receipt, loss=loss)

    def _refuse(self, *_: Any) -> None:
        """Raise InvalidArgumentError if the program calls `step` of the optimizer."""
        if not self._steps:
            raise InvalidArgumentError(
                f"{self._what} exchanges the gradients of this optimizer, whose own "
                f"step() would train this rank alone; call step() of the adapter"
            )

    def _update(self, weight: float) -> Receipt:
        """Exchange the gradients, and update the parameters."""
        raise NotImplementedError

    def _no_gradient(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._what}: there is no gradient; call backward() before step()"
        )

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Give gradients of this rank a weight: those computed in the block.

        ``with opt.weighted(len(batch)): loss.backward()``, and `step` there or after
        the block, which uses the weight of the last backward pass. The mean of
        `CrossShard` and `SyncReplicas` is sum(weight * gradient) / sum(weight). With
        `DropStale` and `AGN`, ``weight`` multiplies the gradient. A weight that is not
        a finite number above 0 is an error of the exchange.
        """
        self._parameters.add_hooks(self._on_gradient)
        before, self._weight = self._weight, weight
        self._next_weight = weight
        try:
            yield
        finally:
            self._weight = before

    @in_stream
    def _on_gradient(self, parameter: Any) -> None:
        """Called when a backward pass has computed it, once there was a weight."""
        self._next_weight = self._weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in backward passes of the block, for micro-batches.

        They are exchanged by the next backward pass outside such a block, or by `step`.
        The sum is not divided by the number of passes.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group: the exchange was made for the parameters there are."""
        if hasattr(self, "optimizer"):
            raise InvalidArgumentError(
                f"{self._what}: parameters cannot be added later; make a new optimizer"
            )
        super().add_param_group(param_group)

    # The state

    @in_stream
    def state_dict(self) -> dict[str, Any]:
        """Return the parameters, the state and the counts of one step. Not collective.

        The entries "state" and "param_groups" are those of a torch optimizer, which can
        load this dictionary, too.

        Raises:
            InvalidArgumentError: With a server, on any rank except the host.
        """
        self._parameters.reclaim()
        self._call_hooks("state_dict_pre")
        state = state_of(self._exchange.snapshot(), self._saved)
        return self._call_hooks("state_dict_post", state)  # type: ignore[no-any-return]

    def _call_hooks(self, kind: str, *state: Any) -> Any:
        """Call those of both optimizers; return the state, which they may replace."""
        for owner in (self.optimizer, self):
            for hook in getattr(owner, f"_optimizer_{kind}_hooks").values():
                changed = hook(owner, *state)
                if state and changed is not None:
                    state = (changed,)
        return state[0] if state else None

    @in_stream
    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Continue from a `state_dict`. Collective.

        Args:
            state_dict: Of the same optimizer; on the host, or rank 0. Others may pass
                None.

        Raises:
            TypeError, InvalidArgumentError: On every rank, if it does not fit; nothing
                is changed.
        """
        self._check_open()
        self._parameters.reclaim()
        what, root = f"{self._what}: load_state_dict", self._group.rank == self._root

        def check() -> Any:
            self._check_present()
            if not root:
                return None, None
            given = state_dict.copy() if isinstance(state_dict, dict) else state_dict
            given = self._call_hooks("load_state_dict_pre", given)
            checked = check_state(given, self._saved, self._parameters.variables)
            self._check_options(checked["param_groups"])
            names = list(self._parameters.tensors)
            return snapshot_of(checked, names), checked["param_groups"]

        snapshot, groups = self._group.agree(what, check, lambda _: {})
        groups = self._group.allgather(groups, what)[self._root]
        for group, saved in zip(self._saved.param_groups, groups, strict=True):
            group.update({name: saved[name] for name in saved if name != "params"})
        self._restore(snapshot, what)
        self._call_hooks("load_state_dict_post")
        self._parameters.note_values()

    @in_stream
    def assign(self) -> None:
        """Set those of all ranks, and of a server, to the values of one. Collective.

        All ranks call it, including those that have left, after rank 0, or the host of
        a server, has changed the values of its parameters. With a dedicated server, the
        values are those of the first rank that trains, and the server takes part in
        `serve`. The state and the counts do not change. See `assign` of the optimizer
        of the same strategy.

        Raises:
            InvalidArgumentError: On every rank, if a parameter has another shape, dtype
                or device now.
        """
        self._exchange.assign()
        self._parameters.note_values()

    def _check_present(self) -> None:
        """Raise InvalidArgumentError if this rank has left and can load no state."""

    def _check_options(self, groups: Any) -> None:
        """Raise InvalidArgumentError unless it can continue with saved options."""

    def _restore(self, snapshot: Any, what: str) -> None:
        """Continue from a checked snapshot of the root. Collective."""
        raise NotImplementedError

    @in_stream
    def center(self, parameter: Any) -> Any:
        """Return a copy of the newest value of a parameter. Not collective.

        With a server, it is the server's.

        Args:
            parameter: A parameter; or a list or tuple of them, copied at one step.

        Returns:
            A tensor, or a list of tensors.

        Raises:
            InvalidArgumentError: If it is not a parameter of the optimizer.
        """
        several = isinstance(parameter, (list, tuple))
        wanted, own = parameter if several else [parameter], self._parameters
        try:
            chosen = [own.variables[own.names[each]] for each in wanted]
        except (KeyError, TypeError):
            message = f"{self._what}: it has no such parameter"
            raise InvalidArgumentError(message) from None
        copies = self._exchange.center(chosen)
        tensors = [tensor_of(each).to(self._first.device) for each in copies]
        return tensors if several else tensors[0]

    def sync_buffers(self) -> None:
        """Average or broadcast the buffers of the module. Collective.

        Floating-point buffers are averaged over all ranks, or set to those of rank 0,
        as ``buffers=`` states; others are set to those of rank 0.
        """
        self._check_open()
        self._buffers.sync(self._group, self._what)

    # The end

    @in_stream
    def leave(self) -> None:
        """Declare that this rank contributes no more gradients.

        As `leave` of the optimizer of the same strategy.
        """
        self._exchange.leave()

    @in_stream
    def free(self) -> None:
        """Synchronize the buffers, and free the exchange. Collective.

        Afterwards the parameters of all ranks are those of the last update.
        `global_step`, `statistics` and `center` remain available.

        Raises:
            InvalidArgumentError: With a server, on every rank, if the program has
                changed parameters of one rank since its last `step`; call `assign`
                first.
        """
        if self._exchange.freed:
            return
        self._before_free()
        self.sync_buffers()
        self._exchange.free()
        for handle in (*self._handles, *self._parameters.hooks.values()):
            handle.remove()

    def _before_free(self) -> None:
        """Do what must be done before ranks wait for each other."""
        # This rank has the last parameters: a model may be converted now.
        with contextlib.suppress(InvalidArgumentError):
            self._parameters.reclaim()

    @property
    def freed(self) -> bool:
        """Whether it was freed."""
        return self._exchange.freed
