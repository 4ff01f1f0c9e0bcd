"""Random operations for any time, and exact counts: mpiexec -n 4 python -m tests.soak.

It runs episodes. In each, all ranks make an object with random settings, do random
operations with random delays, and free it. Every gradient carries a one for its rank
and a number of its own, as integers, so the sums that come out show every gradient
that was lost, counted twice, or torn. After each episode, the memory, descriptors and
threads of each rank are what they were.
"""

from __future__ import annotations

import argparse
import gc
import logging
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.bench.measure import WrongAnswerError
from hpcaccum.dtypes import Array
from tests.kills import Episode

# Operations of a rank in one episode.
_OPERATIONS = 400
# One operation in so many is preceded by a pause of up to this many seconds.
_SELDOM, _PAUSE = 50, 2e-3
# Episodes until libraries have allocated what they keep.
_WARM = 10
# Growth of a rank's memory that is no leak of ours: what allocators keep; and in each
# episode, as MPICH's MPI_Win_allocate_shared and MPI_Win_free keep 300 bytes a window.
_ALLOWED, _EACH = 4 << 20, 4 << 10


class Use(NamedTuple):
    """What one rank holds."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Use:
        """Return that of this process."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * resource.getpagesize(),
            len(list(Path("/proc/self/fd").iterdir())),
            threading.active_count(),
        )


class Soak:
    """Runs episodes until the time is up. Collective.

    Args:
        group: The ranks.
        seconds: The time.
        seed: Of all that is random; the order in which ranks act is not.
    """

    def __init__(self, group: Group, seconds: float, seed: int) -> None:
        self._group, self._seconds, self._seed = group, seconds, seed
        self._counts: Counter[str] = Counter()

    def __call__(self) -> int:
        """Run; return the exit status.

        Raises:
            WrongAnswerError: On every rank, if a sum is wrong on one.
        """
        # Random bounds drop all gradients of some ranks; the counts are compared.
        logger = logging.getLogger("hpcaccum")
        logger.addFilter(_expected)
        try:
            return self._run()
        finally:
            logger.removeFilter(_expected)

    def _run(self) -> int:
        begun, first, episode, over = time.monotonic(), Use.now(), 0, False
        while not over:
            self._episode(episode)
            episode += 1
            if episode == _WARM:
                first = Use.now()
            late = time.monotonic() - begun >= self._seconds
            over = self._group.allgather(late, "time")[0]
        return self._verdict(first, episode)

    def _episode(self, number: int) -> None:
        rng = np.random.default_rng([self._seed, number])
        own = np.random.default_rng([self._seed, number, self._group.rank])
        kind = _KINDS[number % len(_KINDS)]
        failure = None
        try:
            self._counts.update(kind(self._group, rng, own))
        except WrongAnswerError as error:
            failure = error
        what = f"episode {number} of seed {self._seed} ({kind.__name__})"
        self._group.raise_together(what, failure)

    def _verdict(self, first: Use, episodes: int) -> int:
        last = Use.now()
        pairs = zip(first, last, strict=True)
        grown = Use(*(after - before for before, after in pairs))
        total: Counter[str] = Counter()
        for each in self._group.allgather(self._counts, "operations"):
            total.update(each)
        every = self._group.allgather(grown, "what ranks hold")
        worst = Use(*map(max, *every, grown))
        if self._group.rank == 0:
            parts = ", ".join(f"{n:,} {what}" for what, n in sorted(total.items()))
            print(f"{parts}\nall counts and sums of {episodes} episodes are exact")
            print(f"growth since episode {_WARM}, of one rank: {worst}", flush=True)
        made = episodes - _WARM
        return int(
            made > 0
            and (
                worst.memory > _ALLOWED + made * _EACH
                or worst.descriptors > 0
                or worst.threads > 0
            )
        )


def _expected(record: logging.LogRecord) -> bool:
    """Whether a log shows a message that says more than the counts do."""
    return "were all dropped" not in record.msg


def _check(exact: Any, found: Any, what: str) -> None:
    if not np.array_equal(np.atleast_1d(exact), np.atleast_1d(found)):
        raise WrongAnswerError(f"{what}: {found} instead of {exact}")


def _pause(own: np.random.Generator) -> None:
    if own.integers(_SELDOM) == 0:
        time.sleep(own.uniform(0, _PAUSE))


# Episodes


def accumulator(
    group: Group, rng: np.random.Generator, own: np.random.Generator
) -> Counter[str]:
    """All ranks apply and take, in any order, some of them stale or too early."""
    rank, size = group.rank, group.size
    counts: Counter[str] = Counter()
    applied, taken = np.zeros(2 * size), np.zeros(2 * size)
    with hpc.ConditionalAccumulator(
        "float64",
        shape=(2 * size,),
        reduction_type="SUM",
        storage=str(rng.choice(["slots", "sum"])),
        comm=group,
        host=int(rng.integers(size)),
    ) as acc:

        def take(quorum: int, timeout: float) -> None:
            nonlocal taken
            taken = taken + acc.take_grad(quorum, timeout=timeout)
            counts["takes"] += 1

        for number in range(1, 1 + int(own.integers(_OPERATIONS))):
            _pause(own)
            choice = own.integers(10)
            if choice == 0:
                try:
                    take(int(own.integers(1, 1 + size)), own.uniform(0, _PAUSE))
                except hpc.WaitTimeoutError:
                    counts["takes in vain"] += 1
                continue
            grad = np.zeros(2 * size)
            grad[rank], grad[size + rank] = 1, number
            step = acc.global_step - int(choice == 1)
            if acc.apply_grad(grad, step):
                applied += grad
                counts["applies"] += 1
            else:
                counts["stale applies"] += 1
        acc.leave()
        # Nobody applies from here on; the rest is taken by one rank.
        group.allgather(None, "applies made")
        while rank == 0 and acc.num_accumulated():
            take(1, 60)
        tally = acc.statistics().tally
    found = np.sum(group.allgather(taken, "sums that were taken"), axis=0)
    expected = np.sum(group.allgather(applied, "gradients applied"), axis=0)
    _check(expected, found, "gradients and their numbers, of each rank")
    _check(expected[:size], tally.accepted, "gradients accepted, of each rank")
    return counts


def optimizer(
    group: Group, rng: np.random.Generator, own: np.random.Generator
) -> Counter[str]:
    """Ranks push and read as they like, and leave when they like."""
    counts: Counter[str] = Counter()
    value, accepted = np.zeros(int(rng.integers(1, 5000))), 0
    torn: list[Array] = []
    make = _OPTIMIZERS[int(rng.integers(len(_OPTIMIZERS)))]
    opt, var = make(group, value, rng)
    with opt:
        for _ in range(int(own.integers(_OPERATIONS // 4))):
            _pause(own)
            if own.integers(5) == 0:
                values = np.unique(opt.center(var))
                torn += [values] * (len(values) != 1)
                counts["reads"] += 1
                continue
            receipt = opt.minimize(lambda: (0.0, [np.ones_like(value)]))
            accepted += receipt.accepted and receipt.sent
            counts["steps"] += 1
    _check(0, len(torn), f"torn reads: {torn}")
    _check(-opt.global_step, np.unique(opt.center(var)), "the sum of all updates")
    tally = opt.statistics()
    _check(group.allgather(accepted, "accepted"), tally.accepted, "accepted, of each")
    return counts


def _sync_replicas(group: Group, value: Array, rng: np.random.Generator) -> Any:
    quorum = int(rng.integers(1, 1 + group.size))
    opt = hpc.SyncReplicasOptimizer(
        hpc.SGD(1.0), quorum, comm=group, **_place(group, rng)
    )
    return opt, _initialized(opt, value)


def _drop_stale(group: Group, value: Array, rng: np.random.Generator) -> Any:
    staleness = int(rng.integers(2 * group.size))
    opt = hpc.DropStaleGradientOptimizer(
        hpc.SGD(1.0), staleness, comm=group, **_place(group, rng)
    )
    return opt, _initialized(opt, value)


def _agn(group: Group, value: Array, rng: np.random.Generator) -> Any:
    place = _place(group, rng)
    getter = hpc.AGNCustomGetter(comm=group, host=place.pop("host", 0))
    var = hpc.get_variable("w", value, custom_getter=getter)
    opt = hpc.AGNOptimizer(
        hpc.SGD(1.0),
        group.size,
        getter,
        communication_period=int(rng.integers(1, 6)),
        **place,
    )
    opt.initialize([var])
    return opt, var


def _place(group: Group, rng: np.random.Generator) -> dict[str, Any]:
    """Return where the parameters are: on one rank, or on one of each node."""
    if rng.integers(2):
        return {"servers": [ranks[0] for ranks in group.nodes]}
    return {"host": int(rng.integers(group.size))}


def _initialized(opt: Any, value: Array) -> hpc.Variable:
    var = hpc.Variable(value, "w")
    opt.initialize([var])
    return var


_OPTIMIZERS = (_sync_replicas, _drop_stale, _agn)


def reducer(
    group: Group, rng: np.random.Generator, own: np.random.Generator
) -> Counter[str]:
    """Averages of arrays of random sizes, started in a random order."""
    counts: Counter[str] = Counter()
    names = [f"array {number}" for number in range(int(rng.integers(1, 6)))]
    shapes = {name: (int(2 ** rng.uniform(0, 18)),) for name in names}
    total, wrong = group.size * (group.size - 1) // 2, 0
    with hpc.Reducer(
        hpc.Layout(shapes, "float64"), group, reduction_type="SUM"
    ) as reducing:
        for step in range(int(rng.integers(1, 30))):
            _pause(own)
            arrays = reducing.arrays()
            for name in rng.permutation(names):
                arrays[str(name)][...] = group.rank + step
                if rng.integers(2):
                    reducing.start(str(name))
            for found in reducing.wait().values():
                wrong += bool((found != total + group.size * step).any())
            counts["reductions"] += 1
    _check(0, wrong, "arrays with wrong sums")
    return counts


_KINDS: tuple[
    Callable[[Group, np.random.Generator, np.random.Generator], Counter[str]], ...
] = (accumulator, optimizer, reducer)


def main() -> int:
    """Run for as long as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=0, help="of all choices (0)")
    parser.add_argument(
        "--kill", type=int, default=0, help="run one episode; kill so many ranks in it"
    )
    args = parser.parse_args()
    if args.kill:
        group = hpc.group_of()
        what = Episode(group, args.kill, args.seed)()
        if group.rank == 0:
            print(f"all is exact: {what}", flush=True)
        return 0
    return Soak(hpc.group_of(), args.seconds, args.seed)()


if __name__ == "__main__":
    sys.exit(main())
