"""The arguments of a `Reducer`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.arguments import bucket_size, one_of, wire_format
from hpcaccum.reducer import selection

if TYPE_CHECKING:
    from typing_extensions import Self

    from hpcaccum.layout import Layout

REDUCTIONS = ("MEAN", "SUM")


def check_schedule(schedule: str, wire_dtype: Any, cuda_aware: bool) -> None:
    """Raise InvalidArgumentError unless these arguments of `Reducer` fit together."""
    selection.check_name(schedule)
    if wire_dtype is not None:
        selection.check_wire(schedule)
    selection.check_direct(cuda_aware, schedule)


@dataclass(frozen=True)
class Options:
    """The arguments of a reducer."""

    reduction_type: str
    schedule: str
    wire_dtype: np.dtype[Any] | None
    bucket_bytes: int | None
    cuda_aware: bool

    @classmethod
    def checked(
        cls,
        layout: Layout,
        reduction_type: str,
        schedule: str,
        wire_dtype: Any,
        bucket_bytes: int | None,
        cuda_aware: bool,
    ) -> Self:
        """Return the arguments.

        Raises:
            TypeError, InvalidArgumentError: If one is invalid.
        """
        one_of("reduction_type", reduction_type, REDUCTIONS)
        wire = wire_format(wire_dtype, layout.dtype)
        check_schedule(schedule, wire, cuda_aware)
        nbytes = bucket_size(bucket_bytes)
        return cls(reduction_type, schedule, wire, nbytes, bool(cuda_aware))

    def facts(self, layout: Layout) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        return {
            "names, shapes and dtype": layout.fingerprint,
            **vars(self),
            "wire_dtype": str(self.wire_dtype),
        }
