"""What is freed at the end of a ``with`` block."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self


class Freeable:
    """Something collective that must be freed, and that ``with`` frees."""

    def free(self) -> None:
        """Free it. Collective."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free it; after an exception the others may not come, so leave it open."""
        if kind is None:
            self.free()
