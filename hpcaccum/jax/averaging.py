"""The mean of gradients over the ranks, as an optax transformation."""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
import optax
from jax.experimental import io_callback

from hpcaccum.accumulator import Tally
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.jax.structure import Structure
from hpcaccum.layout import Layout
from hpcaccum.mpi import MPI, Freeable, Group, lack_of_threads
from hpcaccum.optimizers.finite import check_choice, to_drop
from hpcaccum.optimizers.shard_layout import check_wire_dtype
from hpcaccum.optimizers.shard_reducer import ShardReducer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI as mpi4py_MPI

    from hpcaccum.dtypes import Array
    from hpcaccum.optimizers.finite import OnNonfinite

_NAME = "hpcaccum.jax.average"

_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


@contextlib.contextmanager
def no_average() -> Iterator[None]:
    """Make the use of `average` an error during the block."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


class Average(optax.GradientTransformation):  # type: ignore[misc]
    """The transformation that `average` returns."""

    _averager: Averager

    def free(self) -> None:
        """Wait for the last update, and free the memory of the exchange. Collective."""
        self._averager.free()

    def statistics(self) -> Tally:
        """Return how many updates of each rank were part of a mean. Not collective.

        It waits for the updates that this rank has begun. Those that were dropped are
        in ``nonfinite``.
        """
        return self._averager.statistics()


def average(
    comm: mpi4py_MPI.Comm | Group | None = None,
    *,
    on_nonfinite: OnNonfinite = "accept",
    wire_dtype: Any = None,
) -> Average:
    """Return a transformation that averages updates over the ranks. Collective.

    In front of a rule, it averages gradients:
    ``optax.chain(average(), optax.adam(1e-3))``. It can be compiled by `jax.jit`: the
    exchange is an ordered callback. All ranks must call its ``update`` equally often
    and in the same order, and start with the same parameters: it does not broadcast
    them.

    The first ``update`` determines the pytree: its structure, shapes and dtypes are the
    same on all ranks, and in all later calls. Half precision is summed in float32. If
    leaves have different dtypes, all of them are exchanged in the widest.

    Args:
        comm: Communicator of the ranks; COMM_WORLD by default.
        on_nonfinite: What happens to updates with a NaN or an infinity: "accept"
            averages them, so that the mean is not finite on any rank. "drop" takes the
            mean over the other ranks; if no rank remains, it is zero, with which the
            rest of the chain is called all the same. "raise" is an error on all ranks.
        wire_dtype: A narrower dtype, such as `jax.numpy.bfloat16`, in which sums travel
            between nodes. They are formed in the wider dtype.

    Returns:
        A GradientTransformation without state. Its ``free()`` releases the memory and
        the communicator; otherwise the end of the program does so. Its ``statistics()``
        counts what was averaged and dropped.

    Raises:
        TypeError: If ``comm`` is not an intracommunicator.
        InvalidArgumentError: On every rank, if an option is wrong, or MPI provides no
            MPI_THREAD_MULTIPLE.
        DisagreementError: On every rank, if an option differs.

    The first ``update`` raises such errors, too, and DisagreementError. An error of a
    later call is a `jax.errors.JaxRuntimeError` on every rank, whose message has it.
    """
    averager = Averager(Group.of(comm), on_nonfinite, wire_dtype)
    made = Average(averager.init, averager.update)
    made._averager = averager
    return made


class Averager(Freeable):
    """Averages pytrees of one structure. Collective.

    Args:
        group: The ranks.
        on_nonfinite, wire_dtype: See `average`.
    """

    def __init__(
        self, group: Group, on_nonfinite: OnNonfinite, wire_dtype: Any
    ) -> None:
        def check() -> dict[str, Any]:
            _check_threads()
            return {
                "on_nonfinite": check_choice(on_nonfinite),
                "wire_dtype": check_wire_dtype(wire_dtype),
            }

        self._options = group.agree(_NAME, check)
        self._group = group
        # Made by the first update, which determines the structure.
        self._structure: Structure | None = None
        self._shard: ShardReducer | None = None

    def init(self, params: Any) -> optax.EmptyState:
        """Return the state, which is empty."""
        return optax.EmptyState()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Return the mean of updates over the ranks, and the state. Collective."""
        if _forbidden.get():
            raise InvalidArgumentError(
                f"{_NAME} cannot be part of the rule of a server, which only the host "
                f"rank calls"
            )
        self._check_open()
        if self._shard is None:
            self._make(updates)
        structure = Structure.of(updates)
        # Others may already wait in a callback, so an error is raised in one, too.
        problem = self._problem(structure)
        means = io_callback(
            functools.partial(self._fail, problem) if problem else self._reduce,
            list(structure.leaves),
            *jax.tree_util.tree_leaves(updates),
            ordered=True,
        )
        return jax.tree_util.tree_unflatten(structure.nesting, means), state

    def _make(self, updates: Any) -> None:
        """Compare the structures of all ranks, and make the exchange. Collective."""
        # Callbacks that run in another thread may use the same communicator.
        jax.effects_barrier()
        structure = self._group.agree(
            _NAME, lambda: Structure.of(updates).check("updates"), Structure.facts
        )
        arrays = dict(zip(structure.names, structure.leaves, strict=True))
        wire, layout = self._options["wire_dtype"], Layout.of(arrays)
        self._shard = ShardReducer(self._group, layout, _NAME, {"wire_dtype": wire})
        self._structure = structure
        # At the end of the program this is freed before the reducer: a callback may
        # still use it.
        self._register(self._group, self._shard.reducer.label)

    def _problem(self, structure: Structure) -> InvalidArgumentError | None:
        """Return the error of a pytree that is not that of the first update."""
        assert self._structure is not None
        if structure == self._structure:
            return None
        mine, first = structure.facts(), self._structure.facts()
        # The names of leaves say more than the structure, and are shorter.
        for name in sorted({**first, **mine}, key=lambda name: name == "structure"):
            if mine.get(name) != first.get(name):
                return InvalidArgumentError(
                    f"{_NAME}: {name} is {mine.get(name, 'missing')}, in the first "
                    f"update it was {first.get(name, 'missing')}; make one average() "
                    f"for each pytree"
                )
        return None

    def _fail(self, problem: Exception, *leaves: Any) -> NoReturn:
        assert self._shard is not None
        self._shard.fail(problem)

    def _reduce(self, *leaves: Any) -> list[Array]:
        """Return the means of arrays, in memory that nothing else uses."""
        assert self._structure is not None
        assert self._shard is not None
        arrays = dict(zip(self._structure.names, map(np.asarray, leaves), strict=True))
        means = {name: np.empty_like(array) for name, array in arrays.items()}
        try:
            given = ((name, array, array.dtype) for name, array in arrays.items())
            skips = to_drop(_NAME, given, self._options["on_nonfinite"])
        except InvalidArgumentError as error:
            self._shard.fail(error)
        if self._shard.reduce(arrays, means, None, skips=skips) is None:
            return [np.zeros_like(array) for array in arrays.values()]
        self._shard.count()
        self._shard.updated()
        return list(means.values())

    def statistics(self) -> Tally:
        """Return how many updates of each rank were averaged and dropped so far."""
        jax.effects_barrier()
        if self._shard is None:
            none = (0,) * self._group.size
            return Tally(none, none, {}, none, none)
        return self._shard.tally()

    def _describe(self) -> str:
        return _NAME

    def _free(self) -> None:
        jax.effects_barrier()
        if self._shard is not None:
            self._shard.finish()


def _check_threads() -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise InvalidArgumentError(lack_of_threads("callbacks of JAX need"))
