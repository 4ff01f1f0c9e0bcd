"""The getter that collects the variables of an AGNOptimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.optimizers.variable import Variable

if TYPE_CHECKING:
    from mpi4py import MPI as mpi4py_MPI
    from numpy.typing import ArrayLike

    from hpcaccum.mpi import Group


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
