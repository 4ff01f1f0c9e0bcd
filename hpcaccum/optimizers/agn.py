"""AGNOptimizer: local steps, one normalized push every communication period."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hpcaccum.accumulator import Receipt
from hpcaccum.arguments import positive_count
from hpcaccum.device import copyto
from hpcaccum.dtypes import Array
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.mpi import Group
from hpcaccum.optimizers.base import Optimizer
from hpcaccum.optimizers.checks import Pairs, Variables, check_variables
from hpcaccum.optimizers.finite import OnNonfinite
from hpcaccum.optimizers.local_steps import LocalSteps
from hpcaccum.optimizers.slices import add_slices, apart, copied_rows
from hpcaccum.optimizers.variable import Variable
from hpcaccum.rows import IndexedSlices, Rows, merged
from hpcaccum.server import ServerOptions, Servers

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI


class UnknownVariableError(InvalidArgumentError, KeyError):
    """Raised for a variable that was not created with the optimizer's getter."""

    __str__ = ValueError.__str__


class AGNCustomGetter:
    """Collects the trainable variables that `get_variable` creates with it.

    Args:
        worker_device: Ignored.
        comm: Communicator of the ranks; COMM_WORLD by default.
        host: The rank that holds the center.

    Attributes:
        variables: The variables, by name.
    """

    def __init__(
        self,
        worker_device: object = None,
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
    ) -> None:
        self.comm, self.host = comm, host
        self.variables: dict[str, Variable] = {}

    def register(self, var: Variable) -> None:
        """Add a variable if it is trainable.

        Raises:
            InvalidArgumentError: If a variable has the same name.
        """
        if var.name in self.variables:
            raise InvalidArgumentError(f"variable {var.name!r} exists already")
        if var.trainable:
            self.variables[var.name] = var


def get_variable(
    name: str,
    initial_value: ArrayLike,
    *,
    trainable: bool = True,
    custom_getter: AGNCustomGetter,
    sparse: bool = False,
    capacity: int | None = None,
) -> Variable:
    """Return a new variable, registered with the getter of an `AGNOptimizer`.

    Args:
        name: As for `Variable`.
        initial_value: Its array.
        trainable: As for `Variable`.
        custom_getter: The getter.
        sparse: As for `Variable`.
        capacity: As for `Variable`.

    Raises:
        TypeError, InvalidArgumentError: As `Variable`; or if the getter has a variable
            of this name.
    """
    var = Variable(initial_value, name, trainable, sparse=sparse, capacity=capacity)
    custom_getter.register(var)
    return var


class AGNOptimizer(LocalSteps):
    """Accumulated gradient normalization: T local steps, then one push of their mean.

    One call with gradient g, local variable x, center c, sum a, period T::

        x := inner(x, g);  a := a + g
        every T-th call:   c := inner(c, a / T), on the host rank;  x := c;  a := 0

    A ``weight`` multiplies g: both lines use weight * g in its place.

    c moves by one step of the inner optimizer for T gradients. So with n workers and T
    larger than n, begin with a learning rate T / n times that of one rank.

    Pushes of several workers are applied one after the other; none is dropped. The
    step counts the pushes of all workers. x and c have separate slots; a push keeps
    those of x. If g is an `IndexedSlices`, the inner optimizer updates its rows of x.
    If the variable is sparse, a has these rows, and so has what is pushed; else both
    are dense arrays.

    A variable whose gradient is None in a call is not updated by it; if that call
    pushes, it is neither pushed nor pulled.

    Args:
        optimizer: Makes the local updates and, on the host rank, those of the center.
        num_worker: Number of workers; accepted for compatibility, the communicator
            determines it.
        custom_getter: Holds the variables, the communicator and the host rank. Without
            it, any variables can be used, as with other optimizers.
        communication_period: T, at least 1.
        use_locking: Ignored.
        name: Name for messages.
        comm, host: See `OneSidedOptimizer`; those of the getter, if there is one.
        dedicated, servers, on_nonfinite, min_workers, wire_dtype: See
            `OneSidedOptimizer`. A call whose gradients are dropped makes no local step
            and does not count.

    Source: Hermans, Accumulated Gradient Normalization, 2017 (arXiv:1710.02368); the
        behavior of ``tf.contrib.opt.AGNOptimizer``, which pushes raw gradients, not
        parameter differences. One deviation: Adam's bias correction of the center
        counts the center's updates.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_worker: int | None = None,
        custom_getter: AGNCustomGetter | None = None,
        communication_period: int = 10,
        use_locking: bool = True,
        name: str = "AGNOptimizer",
        *,
        comm: mpi4py_MPI.Comm | Group | None = None,
        host: int = 0,
        dedicated: bool = False,
        servers: Servers = "auto",
        on_nonfinite: OnNonfinite = "accept",
        min_workers: int = 1,
        wire_dtype: Any = None,
    ) -> None:
        def check(_: int) -> dict[str, int | None]:
            if not isinstance(custom_getter, AGNCustomGetter | None):
                raise TypeError(
                    f"custom_getter must be an AGNCustomGetter, got {custom_getter!r}"
                )
            if custom_getter is not None and (comm, host) != (None, 0):
                raise InvalidArgumentError(
                    "comm and host are those of the custom getter; give them to it"
                )
            period = positive_count(communication_period, "communication_period")
            workers = num_worker
            if workers is not None:
                workers = positive_count(workers, "num_worker")
            return {"communication_period": period, "num_worker": workers}

        # So that all ranks get the error of one, at least on all of MPI's ranks.
        place = ServerOptions(
            getattr(custom_getter, "comm", comm),
            getattr(custom_getter, "host", host),
            dedicated,
            servers,
            on_nonfinite,
            min_workers,
            wire_dtype,
        )
        super().__init__(optimizer, name, check, place)
        self._getter = custom_getter
        self._share = self._period = self._options["communication_period"]

    def initialize(self, var_list: Variables | None = None) -> None:
        """Set the center and all ranks' variables to the host rank's. Collective.

        Args:
            var_list: Variables, of the getter if there is one; then all of them by
                default.
        """
        super().initialize(var_list)

    def _check_start(self, var_list: Variables | None) -> list[Variable]:
        if var_list is None and self._getter is not None:
            var_list = list(self._getter.variables.values())
        variables = super()._check_start(var_list)
        self._check_registered(variables)
        return variables

    def _forget_steps(self) -> None:
        # Names of the variables whose sum is an array that is not zero.
        self._summed: set[str] = set()
        # The sums of sparse variables.
        self._rows = SummedRows(check_variables(self._variables), self._period)

    def _check_registered(self, variables: Iterable[Variable]) -> None:
        if self._getter is None:
            return
        for var in variables:
            if self._getter.variables.get(var.name) is not var:
                raise UnknownVariableError(
                    f"variable {var.name!r} was not created with the custom getter of "
                    f"{self.get_name()}, which has {sorted(self._getter.variables)}"
                )

    def _check_known(self, variables: Sequence[Variable]) -> None:
        self._check_registered(variables)
        super()._check_known(variables)

    def _begin_with(self, variables: list[Variable]) -> None:
        self._check_registered(variables)
        self.initialize(variables if self._getter is None else None)

    def _step_locally(self, pairs: Pairs) -> None:
        rows = copied_rows(pairs, self._rows.dtype)
        self._rows.check(rows)
        given = [(grad, var.name) for grad, var in pairs if grad is not None]
        grads = {name: grad for grad, name in given if name not in rows}
        # The sums need them as they are now.
        arrays = apart(list(grads.values()), [var.value for _, var in pairs])
        self.inner.apply_gradients(pairs)
        # On a device, plain CuPy expressions: a kernel would move as many bytes.
        sums = self._places(self._served[0])
        for name, grad in zip(grads, arrays, strict=True):
            total, first = sums[name], name not in self._summed
            if isinstance(grad, IndexedSlices):
                add_slices(total, grad, first)
            elif first:
                copyto(total, grad)
            else:
                np.add(total, grad, out=total, casting="same_kind")
        self._summed.update(grads)
        self._rows.add(rows)

    def _communicate(self, pairs: Pairs) -> Receipt | None:
        """Push the mean gradients of the variables of a call; pull these variables."""
        if self._calls % self._period:
            return None
        served, given = self._served[0], [v for grad, v in pairs if grad is not None]
        sums = self._places(served)
        arrays = {var.name: sums[var.name] for var in given if not var.sparse}
        for total in arrays.values():
            np.divide(total, total.dtype.type(self._period), out=total)
        sparse = [var.name for var in given if var.sparse]
        rows = self._rows.means(sparse, self._period)
        means: dict[str, Array | Rows] = {**arrays, **rows}
        # Variables without a gradient in this call keep their sums. First: a push that
        # raises may have been accepted, and must not be repeated.
        self._summed.difference_update(arrays)
        self._rows.clear(rows)
        receipt = served.server.push(means, served.step)
        served.useful = receipt.global_step + 1
        # The local steps have changed the rows that are pushed.
        served.pull({name: self._values[name] for name in means})
        return receipt

    def get_init_op(self, task_index: int) -> Callable[[], None]:
        """Return a callable that sets this rank's variables to the center's.

        It resets the sums to zero. It is collective if it initializes the optimizer.

        Args:
            task_index: Ignored.

        Raises:
            InvalidArgumentError: If the getter has no variable.
        """
        if self._getter is not None and not self._getter.variables:
            raise InvalidArgumentError("the custom getter has no trainable variable")

        def init() -> None:
            self.initialize()
            self._served[0].pull_all()
            self._forget_steps()

        return init

    def make_session_run_hook(self, is_chief: bool, task_index: int) -> AGNHook:
        """Return a hook whose ``after_create_session`` runs `get_init_op`."""
        return AGNHook(self, task_index)


class AGNHook:
    """Runs an optimizer's init op as a session hook of TensorFlow does."""

    def __init__(self, optimizer: AGNOptimizer, task_index: int) -> None:
        self._optimizer, self._task_index = optimizer, task_index
        self._init: Callable[[], None] | None = None

    def begin(self) -> None:
        """Create the init op."""
        self._init = self._optimizer.get_init_op(self._task_index)

    def after_create_session(self, session: Any = None, coord: Any = None) -> None:
        """Run the init op."""
        if self._init is None:
            raise InvalidArgumentError("call begin() first")
        self._init()

    def before_run(self, run_context: Any = None) -> None:
        """Do nothing."""

    def after_run(self, run_context: Any = None, run_values: Any = None) -> None:
        """Do nothing."""

    def end(self, session: Any = None) -> None:
        """Do nothing."""


class SummedRows:
    """Sums of the gradients of sparse variables, in the dtype in which they are sent.

    Gradients are kept until a sum is wanted: to add them one by one would take time for
    all rows of the sum with each of them. A sum of any number of gradients has at most
    ``number * capacity`` different rows.
    """

    def __init__(self, variables: Sequence[Variable], number: int) -> None:
        self.dtype = Layout.of({var.name: var.value for var in variables}).dtype
        sparse = [var for var in variables if var.sparse]
        self._most = {var.name: number * var.capacity for var in sparse}
        # In the order of the calls.
        self._parts: dict[str, list[Rows]] = {var.name: [] for var in sparse}

    def check(self, rows: Mapping[str, Rows]) -> None:
        """Raise InvalidArgumentError unless each sum has room for another gradient."""
        for name, new in rows.items():
            parts, most = self._parts[name], self._most[name]
            if sum(part.indices.size for part in (*parts, new)) <= most:
                continue
            parts[:] = [merged(parts)]
            number = np.union1d(parts[0].indices, new.indices).size
            if number > most:
                raise InvalidArgumentError(
                    f"the sum of the gradients of {name!r} would have {number} "
                    f"different rows, at most {most} can be sent (capacity= times "
                    f"communication_period=); at the last push, its gradient was None"
                )

    def add(self, rows: Mapping[str, Rows]) -> None:
        """Add gradients, of ``dtype`` and in memory of their own, by name."""
        for name, new in rows.items():
            self._parts[name].append(new)

    def means(self, names: Iterable[str], number: int) -> dict[str, Rows]:
        """Return the sums of some sparse variables divided by a number, by name."""
        sums = {name: merged(self._parts[name]) for name in names}
        return {
            name: total._replace(values=total.values / self.dtype.type(number))
            for name, total in sums.items()
        }

    def clear(self, names: Iterable[str]) -> None:
        """Remove all gradients of some sparse variables."""
        for name in names:
            self._parts[name].clear()
