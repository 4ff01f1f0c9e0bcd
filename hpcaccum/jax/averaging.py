"""Pytrees on all ranks: their mean, also as an optax transformation; broadcasts."""

from __future__ import annotations

import contextlib
import functools
import numbers
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback

from hpcaccum.accumulator import Tally
from hpcaccum.arguments import check_wire_dtype, rank_number
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.jax.structure import Structure, is_key, key_data
from hpcaccum.layout import Layout
from hpcaccum.mpi import MPI, Freeable, Group, group_of, lack_of_threads
from hpcaccum.optimizers import Variable, start
from hpcaccum.optimizers.checks import exchanged_weight
from hpcaccum.optimizers.finite import OnNonfinite, check_choice, to_drop
from hpcaccum.optimizers.shard_reducer import ShardReducer

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI

_NAME = "hpcaccum.jax.average"
# What comes back of `AverageState.compared`.
_MARK = jax.ShapeDtypeStruct((), np.dtype(np.uint32))

_forbidden: ContextVar[bool] = ContextVar("forbidden", default=False)


@contextlib.contextmanager
def no_average() -> Iterator[None]:
    """Make the use of `average` an error during the block."""
    token = _forbidden.set(True)
    try:
        yield
    finally:
        _forbidden.reset(token)


class AverageState(NamedTuple):
    """The state of `average`.

    Attributes:
        compared: A number of the job whose ranks have compared their parameters in an
            update; at first 0.
    """

    compared: Any


class Average(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
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

    Before a rule, it averages gradients:
    ``optax.chain(average(), optax.adam(1e-3))``. It can be compiled by `jax.jit`. All
    ranks must call its ``update`` the same number of times and in the same order.

    ``update(updates, state, params, weight=n)``, also of a chain, gives the updates of
    this rank a weight, such as the number of samples in its batch: the mean is then
    sum(weight * update) / sum(weight).

    All ranks must start with the same parameters; `broadcast` makes them the same. In
    a job, the first ``update`` of a state with ``params`` compares their bits. The
    first ``update`` determines the structure, shapes and dtypes of the pytree. Half
    precision is summed in float32; leaves of different dtypes are exchanged in the
    widest.

    Args:
        comm: Communicator of the ranks; COMM_WORLD by default.
        on_nonfinite: What happens to updates with a NaN or an infinity: "accept"
            averages them, so the mean is not finite on any rank. "drop" takes the mean
            over the other ranks; if no rank remains, it is zero, and the rest of the
            chain is still called with it. "raise" raises an error on all ranks.
        wire_dtype: A narrower dtype, such as `jax.numpy.bfloat16`, in which sums are
            sent between nodes. They are computed in the wider dtype.

    Returns:
        A GradientTransformation. Its ``free()`` releases the memory and the
        communicator; otherwise the end of the program does so. Its ``statistics()``
        counts what was averaged and dropped.

    Raises:
        TypeError: If ``comm`` is not an intracommunicator.
        InvalidArgumentError: On every rank, if an option is wrong, or MPI provides no
            MPI_THREAD_MULTIPLE.
        DisagreementError: On every rank, if an option differs.

    The first ``update`` raises such errors, too, and DisagreementError. An error of a
    later call, and the error for parameters that differ, is a
    `jax.errors.JaxRuntimeError` on every rank, whose message contains it. Inside
    `jax.vmap`, `jax.pmap` or `jax.shard_map`, each call raises InvalidArgumentError.
    """
    averager = Averager(group_of(comm), _NAME, on_nonfinite, wire_dtype)
    made = Average(averager.init, averager.update)
    made._averager = averager
    return made


def mean(value: Any, comm: mpi4py_MPI.Comm | Group | None = None) -> Any:
    """Return the mean of a value over the ranks. Collective.

    Use it for values that a rank computes from its own data and an optax rule then
    uses, such as the loss: ``rule.update(grads, state, params, value=mean(loss))``. It
    can be used where `average` can, including compiled code. For each structure and
    communicator, it keeps some memory until the end of the program.

    Args:
        value: A float, or a pytree of floats and float arrays, of the same structure,
            shapes and dtypes on all ranks.
        comm: Communicator of the ranks; COMM_WORLD by default.

    Returns:
        The means, as JAX arrays.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: As `average`.
    """
    group = group_of(comm)
    key: tuple[Group, Structure | None]
    try:
        key = group, Structure.of(value)
    except Exception:
        key = group, None  # `update` raises this error, on all ranks
    averager = _of_means.get(key) or Averager(
        group, "hpcaccum.jax.mean", "accept", None
    )
    found, _ = averager.update(value, None)
    # Not before: after an error, all ranks make a new one.
    _of_means[key] = averager
    return found


# What `mean` has used, by group and structure.
_of_means: dict[tuple[Group, Structure | None], Averager] = {}


class Averager(Freeable):
    """Averages pytrees of one structure; see `average`. Collective."""

    def __init__(
        self, group: Group, name: str, on_nonfinite: OnNonfinite, wire_dtype: Any
    ) -> None:
        def check() -> dict[str, Any]:
            if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise InvalidArgumentError(lack_of_threads("callbacks of JAX need"))
            return {
                "on_nonfinite": check_choice(on_nonfinite),
                "wire_dtype": check_wire_dtype(wire_dtype),
            }

        self._options = group.agree(name, check)
        self._group, self._name = group, name
        # In the state after parameters were compared; another job has another number.
        self._mark = np.uint32(zlib.crc32(str(group.order).encode()) | 1)
        # Made by the first update, which determines the structure.
        self._structure: Structure | None = None
        self._shard: ShardReducer | None = None

    def init(self, params: Any) -> AverageState:
        """Return the state of parameters that were not compared yet."""
        return AverageState(jnp.zeros((), jnp.uint32))

    def update(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        weight: Any = 1.0,
        **others: Any,
    ) -> tuple[Any, Any]:
        """Return the mean of updates over the ranks, and the state. Collective."""
        # The rest of a chain may have `others`.
        if _forbidden.get():
            raise InvalidArgumentError(
                f"{self._name} cannot be part of the rule of a server, which only the "
                f"host rank calls"
            )
        self._check_open()
        leaves, nesting = jax.tree_util.tree_flatten(updates)
        arrays, mark = _named_arrays(params), getattr(state, "compared", None)
        # What is no number is an error of the exchange, on all ranks.
        with contextlib.suppress(TypeError, ValueError):
            weight = weight if isinstance(weight, bool) else jnp.asarray(weight, float)
        if not isinstance(weight, jax.Array):
            weight = jnp.asarray(jnp.nan)
        leaves = [*leaves, weight, *arrays.values()]
        *leaves, mark = refuse_mapped(self._name, [*leaves, mark])
        shard, structure = self._shard or self._make(updates), Structure.of(updates)
        # Others may already wait in a callback, so an error is raised in one, too.
        if problem := self._problem(structure, bool(arrays) and mark is None):
            _, *means = _call(lambda *_: shard.fail(problem), leaves, structure)
        elif not arrays:
            # The same function in each call: another one would be compiled.
            _, *means = _call(self._reduce, leaves, structure)
        else:
            mark, *means = self._compare_once(tuple(arrays), leaves, structure, mark)
            state = AverageState(mark)
        return jax.tree_util.tree_unflatten(nesting, means), state

    def _compare_once(
        self, names: tuple[str, ...], leaves: list[Any], structure: Structure, mark: Any
    ) -> list[Any]:
        """Return the new mark of the state, and the means."""

        def compare() -> list[Any]:
            call = functools.partial(self._reduce, names=names)
            return _call(call, leaves, structure)

        def reduce() -> list[Any]:
            _, *means = _call(self._reduce, leaves[: -len(names)], structure)
            return [mark, *means]

        is_new = mark != self._mark
        if isinstance(is_new, jax.core.Tracer):
            return list(jax.lax.cond(is_new, compare, reduce))
        return compare() if is_new else reduce()

    def _make(self, updates: Any) -> ShardReducer:
        """Compare the structures of all ranks, and make the exchange. Collective."""
        # Callbacks that run in another thread may use the same communicator.
        jax.effects_barrier()
        structure = self._group.agree(
            self._name, lambda: Structure.of(updates).check("updates"), Structure.facts
        )
        layout = Layout.of(dict(zip(structure.names, structure.leaves, strict=True)))
        options = {"wire_dtype": self._options["wire_dtype"]}
        shard = ShardReducer(self._group, layout, self._name, options)
        self._structure, self._shard = structure, shard
        # At the end of the program this is freed before the reducer: a callback may
        # still use it.
        self._register(self._group, shard.reducer.label)
        return shard

    def _problem(
        self, structure: Structure, lacks_state: bool
    ) -> InvalidArgumentError | None:
        """Return the error of a wrong state, or of other updates than the first."""
        assert self._structure is not None
        if lacks_state:
            return InvalidArgumentError(
                f"{self._name}: state must be what init or update returned"
            )
        if structure == self._structure:
            return None
        mine, first = structure.facts(), self._structure.facts()
        # The names of leaves say more than the structure, and are shorter.
        for name in sorted({**first, **mine}, key=lambda name: name == "structure"):
            if mine.get(name) != first.get(name):
                return InvalidArgumentError(
                    f"{self._name}: {name} is {mine.get(name, 'missing')}, in the "
                    f"first update it was {first.get(name, 'missing')}; make one "
                    f"average() for each pytree"
                )
        return None

    def _reduce(self, *leaves: Any, names: tuple[str, ...] = ()) -> list[Array]:
        """Return the new mark of the state, and the means of arrays, in new memory."""
        # The leaves are arrays, their weight, and the parameters that are compared.
        assert self._structure is not None
        assert self._shard is not None
        count = len(self._structure.names)
        given, weight = map(np.asarray, leaves[:count]), np.asarray(leaves[count])
        arrays = dict(zip(self._structure.names, given, strict=True))
        means = {name: np.empty_like(array) for name, array in arrays.items()}
        checksums = (start.checksum(np.asarray(each)) for each in leaves[count + 1 :])
        self._shard.facts = dict(zip(names, checksums, strict=True))
        try:
            named = ((name, array, array.dtype) for name, array in arrays.items())
            skips = to_drop(self._name, named, self._options["on_nonfinite"])
            number = exchanged_weight(weight)
        except InvalidArgumentError as error:
            self._shard.fail(error)
        reduce = self._shard.reduce
        if reduce(arrays, means, None, skips=skips, weight=number) is None:
            # Nothing was compared.
            return [np.uint32(0), *map(np.zeros_like, arrays.values())]
        self._shard.count()
        self._shard.updated()
        return [self._mark, *means.values()]

    def statistics(self) -> Tally:
        """Return how many updates of each rank were averaged and dropped so far."""
        jax.effects_barrier()
        if self._shard is None:
            none = (0,) * self._group.size
            return Tally(none, none, {}, none)
        return self._shard.tally()

    def _describe(self) -> str:
        return self._name

    def _free(self) -> None:
        jax.effects_barrier()
        if self._shard is not None:
            self._shard.finish()


def _call(
    function: Callable[..., list[Array]], leaves: Sequence[Any], structure: Structure
) -> list[Any]:
    """Call a function on the host, in the order of the program."""
    results = io_callback(function, [_MARK, *structure.leaves], *leaves, ordered=True)
    mark, *means = results
    if isinstance(mark, jax.core.Tracer):
        return list(results)
    if len(means[0].devices()) > 1:
        # Only the first device has them.
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves[: len(means)]]
        means = map(jax.device_put, map(np.asarray, means), shardings)
    return [jnp.asarray(np.asarray(mark)), *means]


def _named_arrays(params: Any) -> dict[str, Any]:
    """Return the arrays of a pytree, without other leaves, by names for messages."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {
        f"leaf {jax.tree_util.keystr(path)} of params (compared by checksum; "
        f"hpcaccum.jax.broadcast makes it the same)": key_data(leaf)
        for path, leaf in leaves
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, numbers.Number))
    }


def refuse_mapped(name: str, leaves: list[Any]) -> list[Any]:
    """Return values of which no element and no device has its own."""

    def refuse(*_: Any) -> NoReturn:
        raise InvalidArgumentError(
            f"{name} cannot be called inside of jax.vmap, jax.pmap or jax.shard_map, "
            f"where each element or device would make its own exchange; call it "
            f"outside, in a function that jax.jit compiles, whose arrays may be "
            f"divided among devices"
        )

    if _axes():
        refuse()
    places = [n for n, x in enumerate(leaves) if isinstance(x, jax.core.Tracer)]
    if not places:
        return leaves
    # The only way to know of a vmap of a function that was traced before.
    same = jax.custom_batching.custom_vmap(lambda *values: values)
    same.def_vmap(refuse)
    checked = dict(zip(places, same(*(leaves[n] for n in places)), strict=True))
    return [checked.get(number, leaf) for number, leaf in enumerate(leaves)]


def _axes() -> tuple[Any, ...]:
    """Return the axes of devices, or named ones of elements, of what is traced."""
    found = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    try:
        from jax._src.core import get_axis_env
    except ImportError:
        return found
    # The axes of pmap, which is implemented by shard_map only since JAX 0.8.
    return found + tuple(get_axis_env().axis_sizes)


# Broadcasts


def broadcast(
    tree: Any, comm: mpi4py_MPI.Comm | Group | None = None, root: int = 0
) -> Any:
    """Return the pytree of one rank on all ranks. Collective.

    For parameters, and states of rules: ``params = broadcast(params)``.

    Args:
        tree: A pytree of arrays and numbers of any dtypes, of the same structure,
            shapes and dtypes on all ranks. Only the values of the root are used.
        comm: Communicator of the ranks; COMM_WORLD by default.
        root: The rank that has the values.

    Returns:
        New arrays, on the devices of those that this rank passed.

    Raises:
        TypeError, InvalidArgumentError, DisagreementError: On every rank, if a leaf is
            no array and no number, ranks pass different structures, shapes, dtypes or
            roots, or `jax.jit` traces the call.
    """
    group = group_of(comm)
    leaves, nesting = jax.tree_util.tree_flatten(tree)

    def check() -> tuple[list[Array], dict[str, Any]]:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InvalidArgumentError("the call cannot be inside of jax.jit")
        structure = Structure.of(tree)
        arrays = [np.array(key_data(leaf), order="C") for leaf in leaves]
        # A number of Python has more bits than what JAX makes of it.
        dtypes = {
            f"bytes of {n}": x.dtype
            for n, x in zip(structure.names, arrays, strict=True)
        }
        rank = rank_number(root, group.size, "root")
        return arrays, {**structure.facts(), **dtypes, "root": rank}

    name = "hpcaccum.jax.broadcast"
    arrays, _ = group.agree(name, check, lambda checked: checked[1])
    bytes_ = [array.reshape(-1).view(np.uint8) for array in arrays]
    start.broadcast(group, [Variable(each, "a leaf") for each in bytes_], name, root)
    return jax.tree_util.tree_unflatten(nesting, map(_like, leaves, arrays))


def _like(leaf: Any, array: Array) -> Any:
    """Return an array as what a leaf is, and where it is."""
    if is_key(leaf):
        keys = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        return jax.device_put(keys, leaf.sharding)
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding)
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array[()])
