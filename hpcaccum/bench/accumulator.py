"""What an apply and a round of the ConditionalAccumulator cost: a small benchmark.

    mpiexec -n 2 python -m hpcaccum.bench.accumulator [--kib 4 1024 65536] [--json FILE]

For each size:

- a plain copy of the same bytes to memory of this process;
- the same to memory that another process reads between two copies: a store to a cache
  line that another core has read must first take it back, whoever does it;
- `apply_grad` of a gradient from anywhere;
- `apply_grad` of one that lies in its slot, which touches nothing of it: once with the
  program in the cache, as after a small gradient, once with whatever the last round
  left there, which for a large one is nothing;
- a round: every rank applies a gradient that lies in its slot, rank 0 takes the mean,
  the others see the next step.

All ranks do the same thing at the same time, in turns, so ratios hold whatever else the
machine does. The mean is verified before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.accumulator import ConditionalAccumulator
from hpcaccum.deadline import Deadline
from hpcaccum.group import Group
from hpcaccum.mpi import MPI
from hpcaccum.storage import add_in_order
from hpcaccum.window import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = np.ndarray[Any, Any]

_WAIT = 60.0
_ROUNDS = 20, 2000


class Bench:
    """One size: an accumulator, a gradient, and somewhere to copy it to."""

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group, self._step = group, 0
        self._accumulator = ConditionalAccumulator(
            "float32", (nbytes // 4,), comm=group
        )
        self._grad = np.full(nbytes // 4, group.rank + 1, np.float32)
        self._private = [np.zeros_like(self._grad) for _ in range(2)]
        self._total = np.zeros_like(self._grad)
        self._region = Region(group, 0, 2 * nbytes, spread=True)
        self._copies = 0

    def close(self) -> int:
        """Return the bytes of gradients in this rank's window; free it. Collective."""
        nbytes = self._accumulator.statistics().window_bytes
        self._accumulator.free()
        self._region.free()
        return nbytes

    def _part(self, rank: int, which: int) -> Array:
        offset = which * self._grad.nbytes
        return self._region.view(rank, offset, self._grad.size, self._grad.dtype)

    def verify(self) -> None:
        """Check one round in which all gradients differ. Collective."""
        expected = (self._group.size + 1) / 2
        for grad in (self._grad, self._filled_slot()):
            self._apply(grad)
            mean = self._turn()
            if mean is not None:
                np.testing.assert_array_equal(mean, np.float32(expected))

    def _filled_slot(self) -> Array:
        slot = self._accumulator.slot(timeout=_WAIT)
        np.copyto(slot, self._grad)
        return slot

    def _apply(self, grad: Array) -> None:
        if not self._accumulator.apply_grad(grad, self._step):
            raise RuntimeError("a gradient of the current step was dropped")

    def _turn(self) -> Array | None:
        """End a round: rank 0 takes the mean, others wait for the next step."""
        self._step += 1
        if self._group.rank == 0:
            return self._accumulator.take_grad(self._group.size, timeout=_WAIT)
        Deadline(_WAIT, "round").wait(
            lambda: self._accumulator.global_step == self._step or None,
            lambda: f"step {self._step}",
        )
        return None

    def copy(self) -> float:
        """Return the seconds of a plain copy, to two places in turns as slots are."""
        self._copies += 1
        begun = time.perf_counter()
        np.copyto(self._private[self._copies % 2], self._grad)
        return time.perf_counter() - begun

    def shared(self) -> float:
        """Return the seconds of a copy to where rank 0 then reads it."""
        self._copies += 1
        which = self._copies % 2
        place = self._part(self._group.rank, which)
        begun = time.perf_counter()
        np.copyto(place, self._grad)
        seconds = time.perf_counter() - begun
        self._group.comm.Barrier()
        if self._group.rank == 0:
            parts = [self._part(rank, which) for rank in range(self._group.size)]
            add_in_order(parts, self._total)
        return seconds

    def apply(self) -> float:
        """Return the seconds of an apply that copies."""
        begun = time.perf_counter()
        self._apply(self._grad)
        seconds = time.perf_counter() - begun
        self._turn()
        return seconds

    def apply_slot(self) -> float:
        """Return the seconds of an apply in place, with the program in the cache."""
        self._accumulator.apply_grad(self._grad, self._step - 1)  # is dropped
        return self.apply_slot_cold()

    def apply_slot_cold(self) -> float:
        """Return the seconds of an apply of a gradient that lies in its slot."""
        slot = self._accumulator.slot(timeout=_WAIT)
        begun = time.perf_counter()
        self._apply(slot)
        seconds = time.perf_counter() - begun
        self._turn()
        return seconds

    def round(self) -> float:
        """Return the seconds of a round with gradients that lie in their slots."""
        begun = time.perf_counter()
        self._apply(self._accumulator.slot(timeout=_WAIT))
        self._turn()
        return time.perf_counter() - begun


def measure(group: Group, nbytes: int, seconds: float) -> dict[str, float]:
    """Return medians over all ranks, in microseconds, and the memory. Collective.

    Args:
        group: The ranks.
        nbytes: Of a gradient.
        seconds: How long to measure, about.
    """
    bench = Bench(group, nbytes)
    bench.verify()
    kinds = {
        "copy": bench.copy,
        "shared": bench.shared,
        "apply": bench.apply,
        "slot": bench.apply_slot,
        "cold": bench.apply_slot_cold,
        "round": bench.round,
    }
    samples = _samples(group, kinds, seconds)
    row = {
        kind: 1e6 * float(np.median(np.concatenate(group.meet(times, "bench"))))
        for kind, times in samples.items()
    }
    window = max(group.meet(bench.close(), "bench"))
    return {"bytes": nbytes, **row, "window_gradients": window / nbytes}


def _samples(
    group: Group, kinds: dict[str, Callable[[], float]], seconds: float
) -> dict[str, list[float]]:
    """Run all kinds in turns, as often as fits into the time, at all ranks alike."""
    once = [_run(group, kind) for _ in range(3) for kind in kinds.values()]
    fits = int(seconds / max(sum(once[-len(kinds) :]), 1e-6))
    rounds = min(group.meet(min(max(fits, _ROUNDS[0]), _ROUNDS[1]), "bench"))
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, kind in kinds.items():
            samples[name].append(_run(group, kind))
    return samples


def _run(group: Group, kind: Callable[[], float]) -> float:
    group.comm.Barrier()
    return kind()


def _table(rows: Sequence[dict[str, float]], group: Group) -> str:
    head = (
        f"{group.size} ranks, {MPI.get_vendor()[0]}; medians over all ranks, us\n"
        f"{'bytes':>9} {'copy':>8} {'shared':>8} {'apply':>8} {'/copy':>6} "
        f"{'/shared':>7} {'in slot':>8} {'cold':>7} {'round':>8}\n"
    )
    body = (
        f"{row['bytes']:>9} {row['copy']:>8.1f} {row['shared']:>8.1f} "
        f"{row['apply']:>8.1f} {row['apply'] / row['copy']:>6.2f} "
        f"{row['apply'] / row['shared']:>7.2f} {row['slot']:>8.1f} "
        f"{row['cold']:>7.1f} {row['round']:>8.1f}\n"
        for row in rows
    )
    window = max(row["window_gradients"] for row in rows)
    return head + "".join(body) + f"memory: {window:.1f} gradients a rank"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all sizes; print a table on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m hpcaccum.bench.accumulator")
    sizes = [4, 64, 1024, 16384, 65536]
    parser.add_argument("--kib", type=int, nargs="+", default=sizes, metavar="KIB")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size")
    parser.add_argument("--json", type=Path, help="append one JSON line a size")
    options = parser.parse_args(arguments)
    group = Group.of()
    if not group.single_node:
        parser.error("all ranks must be on one node, where slots are shared memory")
    rows = [measure(group, 1024 * kib, options.seconds) for kib in options.kib]
    if group.rank == 0:
        print(_table(rows, group))
        if options.json:
            facts = {"ranks": group.size, "mpi": MPI.Get_library_version().strip()}
            lines = (json.dumps({**facts, **row}) + "\n" for row in rows)
            with options.json.open("a") as file:
                file.writelines(lines)


if __name__ == "__main__":
    main()
