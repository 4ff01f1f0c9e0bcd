"""The adapter that averages gradients over all ranks during the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.autograd import Variable as Autograd

from hpcaccum.accumulator import Receipt
from hpcaccum.device import release
from hpcaccum.dtypes import Array
from hpcaccum.errors import DisagreementError, InvalidArgumentError
from hpcaccum.mpi import Group
from hpcaccum.optimizers import CrossShardOptimizer
from hpcaccum.optimizers.checks import Pairs, exchanged_weight
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.shard_reducer import ShardReducer
from hpcaccum.optimizers.slices import Gradient, exchanged, with_sums
from hpcaccum.rows import Rows
from hpcaccum.torch.adapter import Adapter, in_stream
from hpcaccum.torch.buffers import AVERAGE
from hpcaccum.torch.parameters import dense
from hpcaccum.torch.rule import TorchRule
from hpcaccum.torch.state import of_arrays
from hpcaccum.torch.tensors import is_cuda

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI as mpi4py_MPI


class CrossShard(Adapter):
    """Averages the gradients of all ranks, like DistributedDataParallel. Collective.

    The exchange of a gradient begins as soon as the backward pass has computed it, and
    ends with the backward pass. From then on ``grad`` is the mean, so that
    ``clip_grad_norm_`` is the same on all ranks. `step` makes the same update on every
    rank. If all ranks drop their gradients, there is no update, and ``grad`` is None.

    Args:
        optimizer: Of `torch.optim`; makes the updates.
        module, buffers, comm: See `Adapter`. For groups of ranks that train separately,
            give each group its own communicator.
        sparse: The parameters whose gradients are sparse, such as the weights of
            `torch.nn.Embedding(sparse=True)`; the same on all ranks. Only the rows of
            these gradients are exchanged. ``grad`` is the sparse mean: rows that a rank
            does not have count as zero.
        find_unused: Whether a parameter may have a gradient on some ranks only; the
            others count as zeros, as in DistributedDataParallel. ``grad`` is None if no
            rank has one. By default this raises an error on all ranks.
        on_nonfinite: What happens to gradients with a NaN or an infinity: "accept"
            averages them, "drop" takes the mean over the other ranks, "raise" raises
            InvalidArgumentError on all ranks.
        wire_dtype: A narrower dtype, such as `torch.bfloat16`, in which sums of
            gradients are sent between nodes. They are computed in the wider dtype, and
            each ``grad`` has the dtype of its parameter. On one node nothing is sent.
        schedule: How gradients are reduced; see `hpcaccum.Reducer`. "nccl" sums those
            of parameters on a device by NCCL, on one node.
    """

    _exchange: CrossShardOptimizer

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        module: torch.nn.Module | EllipsisType | None = ...,
        buffers: str = AVERAGE,
        comm: mpi4py_MPI.Comm | Group | None = None,
        sparse: Iterable[torch.Tensor] = (),
        find_unused: bool = False,
        on_nonfinite: OnNonfinite = "accept",
        wire_dtype: torch.dtype | str | None = None,
        schedule: str = "auto",
    ) -> None:
        self._find_unused = bool(find_unused)
        # Whether a backward pass has begun an exchange, and what went wrong.
        self._started = False
        self._problem: Exception | None = None
        # Whether each `grad` is a mean over the ranks; if so, whether it is without the
        # gradients of this rank, and whether there are any.
        self._averaged = self._skipped = self._found = False
        # With which weight.
        self._used_weight = 1.0
        super().__init__(
            optimizer,
            functools.partial(CrossShardOptimizer, schedule=schedule),
            module=module,
            buffers=buffers,
            comm=comm,
            sparse=sparse,
            on_nonfinite=on_nonfinite,
            wire_dtype=wire_dtype,
        )
        self._parameters.add_hooks(self._on_gradient)

    def _facts(self, rule: TorchRule) -> Mapping[str, object]:
        # Each rank has its own, which is not broadcast.
        return {
            "state of the optimizer (load it on all ranks)": rule.checksum(),
            "find_unused": self._find_unused,
        }

    @in_stream
    def _open(self) -> None:
        super()._open()
        self._shard: ShardReducer = self._exchange._any_shard()
        # Memory for means on a device, which replace the gradients instead.
        release(self._exchange._sums)

    @in_stream
    def _on_gradient(self, parameter: Any) -> None:
        self._averaged, self._next_weight = False, self._weight
        if not self._syncs:
            self._discard()
            return
        # In each call, as the end of an earlier pass may have been skipped.
        Autograd._execution_engine.queue_callback(self._end_pass)
        if self._problem is None:
            try:
                self._start(parameter)
            except Exception as error:
                # The other ranks wait for this one at the end of the pass.
                self._problem = error

    def _start(self, parameter: Any) -> None:
        if not self._started:
            self._shard.check_present()
            self._started = True
        if parameter.grad is None:
            # A function has returned None for it.
            return
        name = self._parameters.names[parameter]
        if name in self._shard.started:
            # An error has ended the pass in which it was.
            self._discard()
        # How many rows there are is known when all gradients are.
        elif self._parameters.is_final(parameter):
            self._shard.start(name, dense(name, parameter.grad), self._weight)

    def _discard(self) -> None:
        """Do not use what a pass has started that an error has ended."""
        if self._started:
            self._shard.stale = True

    @in_stream
    def _end_pass(self) -> None:
        """Called at the end of a backward pass, once for each gradient."""
        if self._started or self._problem is not None:
            self._average(self._weight)

    def _average(self, weight: float) -> None:
        """Exchange the gradients, or raise the error of one rank on every rank."""
        passed, self._started = self._started, False
        problem, self._problem = self._problem, None
        pairs: Pairs = []
        given: dict[str, Array | Rows] = {}
        skips, lacks = False, frozenset[str]()
        sums: Mapping[str, Array | Rows] | None = None
        means: dict[str, Gradient] = {}
        self._used_weight = weight
        try:
            try:
                weight = exchanged_weight(weight)
                if self._find_unused:
                    lacks = self._parameters.fill()
                pairs = self._parameters.pairs()
                skips = self._exchange._drops(pairs)
                given = exchanged(pairs)
                if not given and not passed:
                    raise self._no_gradient()
            except Exception as error:
                problem = problem or error
            if problem is not None:
                self._shard.fail(problem)
            self._shard.rates = self._rule.learning_rates()
            out: Any = given if is_cuda(self._first) else None
            sums = self._shard.reduce(
                given, out, None, skips=skips, lacks=lacks, weight=weight
            )
            # The call that updates the parameters is the user's.
            self._shard.updated()
            pairs = [(g, var) for g, var in pairs if sums and var.name in sums]
            averaged = with_sums(pairs, sums or {})
            means = {var.name: each for each, var in averaged if each is not None}
        except DisagreementError as error:
            if "gradient of " in str(error):
                error.args = (f"{error}; find_unused=True uses zeros instead of none",)
            raise
        finally:
            self._parameters.clear(lacks.difference(means))
            if not is_cuda(self._first):
                self._parameters.replace(means)
        if sums is None:
            self._parameters.clear()
        self._found = bool(means)
        self._averaged, self._skipped = True, skips

    def _update(self, weight: float) -> Receipt:
        if not self._averaged:
            self._discard()
            self._average(weight)
        elif weight != self._used_weight or isinstance(weight, bool):
            raise InvalidArgumentError(
                f"{self._what}: the backward pass has exchanged the gradients with "
                f"weight {self._used_weight}, not {weight}; call backward() and step() "
                f"in a block of weighted()"
            )
        if not self._found and not self._skipped:
            # The same on all ranks.
            raise self._no_gradient()
        self._averaged, step = False, self._exchange.global_step
        if self._found:
            self._shard.count()
            self.optimizer.step()
        return Receipt(not self._skipped, step, step, nonfinite=self._skipped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in PyTorch."""
        super().zero_grad(set_to_none)
        self._averaged = False
        self._discard()

    def _check_present(self) -> None:
        self._shard.check_present()

    def _restore(self, snapshot: Any, what: str) -> None:
        states = {} if snapshot is None else snapshot["state"]
        formats: dict[str, Any] = {
            name: of_arrays(lambda part: (part.shape, str(part.dtype)), parts)
            for name, parts in states.items()
        }
        formats = self._group.allgather(formats, what)[self._root]
        # All ranks have the same state, with the values of the root after `restore`.
        self._rule._kept_state(self._parameters.variables.values()).set(
            {
                name: of_arrays(lambda part: np.zeros(*part), parts)
                for name, parts in formats.items()
            }
        )
        self.zero_grad()
        self._exchange.restore(snapshot, self._parameters.variables.values())
