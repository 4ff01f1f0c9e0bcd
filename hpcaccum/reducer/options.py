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
        selection.check_name(schedule)
        wire = wire_format(wire_dtype, layout.dtype)
        if wire is not None:
            selection.check_wire(schedule)
        selection.check_direct(cuda_aware, schedule)
        nbytes = bucket_size(bucket_bytes)
        return cls(reduction_type, schedule, wire, nbytes, bool(cuda_aware))

    def facts(self, layout: Layout) -> dict[str, object]:
        """Return what must be the same on all ranks, as messages name it."""
        return {
            "names, shapes and dtype": layout.fingerprint,
            **vars(self),
            "wire_dtype": str(self.wire_dtype),
        }
