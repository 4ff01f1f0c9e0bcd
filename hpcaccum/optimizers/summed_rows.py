"""Sums of gradients of sparse variables, on the rank that computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcaccum.errors import InvalidArgumentError
from hpcaccum.layout import Layout
from hpcaccum.row_sums import Rows, merged, union_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpcaccum.optimizers.variable import Variable


class SummedRows:
    """Sums of the gradients of sparse variables, which have rows only.

    Gradients are kept until a sum is wanted: to add them one by one would take time for
    all rows of the sum with each of them.

    Args:
        variables: All variables.
        number: How many gradients a sum usually has. It may have more of them, with
            ``number * capacity`` different rows at most.

    Attributes:
        dtype: Of the sums: that in which a server gets the gradients of the variables.
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
            number = union_size(parts[0].indices, new.indices)
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

    def clear_all(self) -> None:
        """Remove all gradients."""
        self.clear(self._parts)
