"""Sums on the devices of one node, by NCCL."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np

from hpcaccum.deadline import Deadline
from hpcaccum.device import (
    NcclSum,
    card,
    check_current,
    cupy,
    current_device,
    nccl_library,
    unique_id,
)
from hpcaccum.errors import InvalidArgumentError, format_ranks
from hpcaccum.mpi import Group, NodeMemory
from hpcaccum.reducer.schedule import Call, MessageSchedule, Plan
from hpcaccum.reducer.signature import FAILED

_WHAT = "schedule 'nccl'"
_WORKS, _FAILS = 1, 2


class Nccl(MessageSchedule):
    """NCCL's allreduce of device memory, which never enters CPU memory.

    NCCL has no time limit, and ranks that pass different data get no error. So all
    ranks first wait for each other and compare their signatures. After they have queued
    their sums they compare whether this succeeded: a rank whose device waits for one
    that failed would wait without end.
    """

    name = "nccl"
    device_only = True
    # NCCL cuts vectors into pieces of its own.
    default_bucket_bytes = 1 << 30

    def __init__(self, plan: Plan) -> None:
        self._sum = _connect(plan.group)
        self._device = current_device()
        super().__init__(plan)
        self._broken: str | None = None

    def check_usable(self) -> None:
        """Raise if NCCL has failed, or another device has become the current one."""
        check_current(_WHAT, self._device)
        if self._broken is None:
            try:
                self._sum.check()
            except Exception as error:
                self._abort(error)
        if self._broken is not None:
            raise RuntimeError(
                f"NCCL has failed: {self._broken}; make a new reducer, and set "
                f"NCCL_DEBUG=WARN to see more"
            )

    def _abort(self, error: Exception | None) -> None:
        self._broken = str(error or "on another rank")
        # If it fails, too, the ranks must still learn of the first error.
        with contextlib.suppress(Exception):
            self._sum.abort()

    def complete(self, call: Call) -> bool:
        """Compare the signatures of a call without arrays."""
        return self._agree(call.signature)

    def reduce_device(self, signature: int, buffer: Any) -> bool:
        """Wait for all ranks, then queue the sum of the buffer in place."""
        if not self._agree(signature):
            return False
        failure = None
        try:
            for bucket in self.buckets:
                self._sum(buffer[bucket])
        except Exception as error:
            failure = error
        mine = FAILED if failure else signature
        if self._agree(mine) and failure is None:
            return True
        self._abort(failure)
        if failure is not None:
            self.failure = RuntimeError(f"NCCL has failed: {failure}")
        return False

    def free(self, *, abandoned: bool = False) -> None:
        """Do as `Schedule.free`."""
        if abandoned:
            self._sum.abort()
        elif self._broken is None:
            self._sum.free()
        super().free(abandoned=abandoned)


def _connect(group: Group) -> NcclSum:
    """Make what sums on the devices of a group. Collective."""
    found: tuple[str, bytes] = "", b""
    failure = None
    try:
        nccl_library()
        # Each identity costs a thread of NCCL.
        found = card(), b"" if group.rank else unique_id()
    except Exception as error:
        failure = error
    cards, identities = zip(*group.raise_together(_WHAT, failure, found), strict=True)
    _check_apart(cards)
    return _connected(group, identities[0])


def _check_apart(cards: tuple[str, ...]) -> None:
    for each in cards:
        sharing = [rank for rank, other in enumerate(cards) if other == each]
        if len(sharing) > 1:
            raise InvalidArgumentError(
                f"{_WHAT} needs a GPU for each rank, {format_ranks(sharing)} use "
                f"{each}; call hpcaccum.device.use_device first, with the number of "
                f"the rank on its node"
            )


def _connected(group: Group, identity: bytes) -> NcclSum:
    """Connect in a thread, because NCCL has no time limit. Collective."""
    # Each rank writes how that has ended, for ranks whose NCCL waits.
    memory = NodeMemory(group, [8] * group.size)
    ends = [part.view(np.int64) for part in memory.parts]
    device, made, failures = current_device(), list[NcclSum](), list[Exception]()

    def connect() -> None:
        try:
            # The current device is one of each thread.
            cupy().cuda.Device(device).use()
            made.append(NcclSum(group.size, identity, group.rank))
        except Exception as error:
            failures.append(RuntimeError(f"NCCL cannot connect: {error}"))
        ends[group.rank][0] = _FAILS if failures else _WORKS

    def ended() -> bool | None:
        found = [int(end[0]) for end in ends]
        return True if _FAILS in found or all(found) else None

    def missing() -> str:
        late = [rank for rank, end in enumerate(ends) if not end[0]]
        return f"{format_ranks(late)} of {group.size} to connect by NCCL"

    threading.Thread(target=connect, name="hpcaccum-nccl", daemon=True).start()
    try:
        Deadline(None, f"{_WHAT}: connecting").wait(ended, missing)
        group.raise_together(_WHAT, failures[0] if failures else None)
    except BaseException:
        for each in made:
            each.abort()
        raise
    memory.free()
    return made[0]
