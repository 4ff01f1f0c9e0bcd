"""What all handles of one `ConditionalAccumulator` have in common."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcaccum.accumulator.protocol import Rounds
from hpcaccum.accumulator.settings import Settings
from hpcaccum.accumulator.shapes import ShapeTable, is_fixed
from hpcaccum.accumulator.state import Packing
from hpcaccum.accumulator.storage import Slots, Sums, choose
from hpcaccum.accumulator.writer import Writer
from hpcaccum.dtypes import accumulation_dtype
from hpcaccum.mpi import Group, Opened, is_ending

if TYPE_CHECKING:
    from hpcaccum.accumulator.receipts import Tally


@dataclass(frozen=True)
class AccumulatorStatistics:
    """A look at an accumulator.

    Attributes:
        global_step: The step now.
        num_accumulated: Gradients that no take has handed out yet.
        tally: Gradients accepted and dropped so far, by rank, and their lags.
        left: Ranks that have left.
        storage: ``"slots"`` or ``"sum"``.
        window_bytes: Memory of this rank that holds gradients.
    """

    global_step: int
    num_accumulated: int
    tally: Tally
    left: tuple[int, ...]
    storage: str
    window_bytes: int


class SharedAccumulator:
    """What all handles of one accumulator have in common. Collective."""

    def __init__(self, group: Group, settings: Settings, what: str) -> None:
        self.group, self.settings, self.users = group, settings, 0
        shaped = not is_fixed(settings.shape)
        limit = Packing(shaped=shaped).max_shapes
        wide = accumulation_dtype(settings.dtype)
        nbytes = settings.capacity * wide.itemsize
        kind = choose(settings.storage, group, settings.host, nbytes)
        make = Slots if kind == Slots.name else Sums
        with contextlib.ExitStack() as undo:
            self.rounds = Rounds(
                group,
                settings.host,
                what,
                workers=settings.workers,
                shaped=shaped,
                extra=ShapeTable.words(limit),
            )
            undo.callback(self.rounds.free)
            self.storage: Slots | Sums = make(
                group, settings.host, settings.capacity, wide
            )
            undo.pop_all()
        self.shapes = ShapeTable(self.rounds.words, self.rounds.first_extra, limit)
        self.writer = Writer(self.rounds, self.storage, group.rank)
        self.progress = group.progress if group.rank == settings.host else None
        if self.progress:
            self.progress.start()
        all_bring = settings.workers == group.size
        self.brings = all_bring or group.rank != settings.host
        self.opened = Opened(group, self._free, what)

    def _free(self) -> None:
        if is_ending() and self.brings:
            # Nobody waits for a gradient of a rank whose program is over.
            self.writer.leave()
        self.group.allgather(None, f"{self.opened.label}: free")
        if self.progress:
            self.progress.stop()
        self.writer.free()
        self.storage.free()
        self.rounds.free()
