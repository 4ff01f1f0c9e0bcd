"""What all optimizers that hold another one have in common."""

from __future__ import annotations

from typing import Any

from hpcaccum.errors import FreedError
from hpcaccum.mpi import Freeable
from hpcaccum.optimizers.base import Optimizer, check_inner
from hpcaccum.optimizers.variable import Variable


class Wrapper(Freeable, Optimizer):
    """Exchanges gradients and leaves the updates to another optimizer.

    Args:
        inner: What makes the updates; its state is shown as this one's.
        name: Of this one.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        InvalidArgumentError: If ``inner`` exchanges gradients in a way that cannot
            happen inside of this one.
    """

    def __init__(self, inner: Optimizer, name: str) -> None:
        super().__init__(name)
        check_inner(inner, self)
        self.inner = inner
        self._freed = False

    def __repr__(self) -> str:
        """Show the inner optimizer; the same on ranks that were given the same one."""
        return f"{type(self).__name__}({self.inner!r}, name={self.get_name()!r})"

    @property
    def learning_rate(self) -> Any:
        """That of the inner optimizer, where it makes the updates; may be set.

        With a one-sided optimizer the host makes those of the center: set it there. On
        other ranks it has no effect on the center. With a collective one, set it on
        all ranks of a group alike.

        Raises:
            AttributeError: If the inner optimizer has none.
        """
        return self.inner.learning_rate  # type: ignore[attr-defined]

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        # Checked first: the user's own optimizer would take any attribute.
        _ = self.learning_rate
        self.inner.learning_rate = rate  # type: ignore[attr-defined]

    def get_slot(self, var: Variable, name: str) -> Variable | None:
        """Return a slot of the inner optimizer."""
        return self.inner.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """Return the slot names of the inner optimizer."""
        return self.inner.get_slot_names()

    def variables(self) -> list[Variable]:
        """Return the state variables of the inner optimizer."""
        return self.inner.variables()

    def free(self) -> None:
        """Free what the exchange needs. Collective."""
        self._freed = True
        self._release()

    def _release(self) -> None:
        self.inner._release()

    def _check_open(self) -> None:
        if self._freed:
            raise FreedError(f"optimizer {self.get_name()!r} was freed")
