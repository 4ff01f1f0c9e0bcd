"""Random operations during which ranks are killed: python -m tests.soak --kill 1.

A job is one episode, as a rank that is killed does not come back. Ranks other than the
host are killed at a random moment, at any instruction. Every gradient has an element of
its own, so the end shows which gradients of the others count, and how often. It must be
those that their receipts say.
"""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any, NamedTuple

import numpy as np

import hpcaccum as hpc
from hpcaccum import Group
from hpcaccum.bench.measure import WrongAnswerError
from hpcaccum.dtypes import Array
from tests import internals

# Gradients of a rank: few, and slowly; or many. And seconds until ranks are killed.
_FEW, _MANY, _SECONDS = 100, 600, 0.5
# So that all ranks of a node work on one update.
_PIECES = {"chunk": 50, "least": 100, "most": 200}


class Kept(NamedTuple):
    """A gradient that was accepted: its element of its rank, its step, its part."""

    element: int
    step: int
    part: float


class Episode:
    """One episode. Collective.

    Args:
        group: The ranks.
        victims: How many of them are killed.
        seed: Of all choices but the moment.
    """

    def __init__(self, group: Group, victims: int, seed: int) -> None:
        self._group, rng = group, np.random.default_rng(seed)
        self._own = np.random.default_rng([seed, group.rank])
        order = rng.permutation(group.size).tolist()
        # Rank 0 decides which ranks are lost.
        order.remove(0)
        self._victims, order = order[:victims], [0, *order[victims:]]
        self._host = int(rng.choice(order))
        self._number = int(rng.choice([_FEW, _MANY]))
        self._rule = (hpc.SGD(1.0), hpc.Momentum(1.0, 1.0))[rng.integers(2)]
        self._limits = _PIECES if rng.integers(2) else {}
        self._together = bool(rng.integers(2))
        self._rng, self._kept = rng, list[Kept]()

    def __call__(self) -> str:
        """Run it; return what was done, if all is as it must be.

        Raises:
            WrongAnswerError: If not.
        """
        kinds = (self._accumulator, self._sync_replicas, self._drop_stale, self._agn)
        kind = kinds[self._rng.integers(len(kinds))]
        with internals.limits(**self._limits):
            what = kind()
        return (
            f"{what}, {self._number} gradients each, {type(self._rule).__name__}, host "
            f"{self._host}, {self._limits or 'whole updates'}: without {self._victims}"
        )

    @property
    def _dies(self) -> bool:
        return self._group.rank in self._victims

    def _begin(self) -> None:
        """Begin together; die soon if this rank is to be killed."""
        self._group.allgather(None, "begin")
        if self._dies:
            both = self._rng if self._together else self._own
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, both.uniform(1e-6, _SECONDS))

    def _pause(self) -> None:
        if self._number == _FEW and not self._dies:
            time.sleep(self._own.uniform(0, 2 * _SECONDS / _FEW))

    def _await_loss(self) -> None:
        while self._dies:
            time.sleep(1)
        while len(self._group.lost) < len(self._victims):
            time.sleep(0.01)

    def _meet(self, value: Any) -> dict[int, Any]:
        """Return the values of the ranks that are left, by rank."""
        return self._group.gather_present(value, "what was accepted")

    def _check(self, correct: Any, what: str) -> None:
        if not correct:
            raise WrongAnswerError(f"{what}; without {self._victims}")

    def _accumulator(self) -> str:
        storage = str(self._rng.choice(["slots", "sum"]))
        victims_take = bool(self._rng.integers(2))
        shape = self._group.size, self._number
        acc = hpc.ConditionalAccumulator(
            "f8",
            shape,
            storage=storage,
            reduction_type="SUM",
            comm=self._group,
            host=self._host,
        )
        taken = np.zeros(shape)
        self._begin()
        number = 0
        while number < self._number or self._dies:
            self._pause()
            if (victims_take or not self._dies) and self._own.integers(4) == 0:
                quorum = int(self._own.integers(1, 1 + self._group.size))
                with contextlib.suppress(hpc.WaitTimeoutError):
                    taken += acc.take_grad(quorum, timeout=self._own.uniform(0, 2e-3))
                continue
            receipt = acc.apply_grad(self._gradient(number), 1 << 30)
            self._keep(number, receipt)
            number += 1
        acc.leave()
        self._await_loss()
        self._meet(None)
        with contextlib.suppress(hpc.EverybodyLeftError):
            while self._group.rank == 0:
                taken += acc.take_grad(1, timeout=60)
        kept, taken = self._meet(self._kept), sum(self._meet(taken).values())
        acc.free()
        rounds: dict[int, set[float]] = {}
        for rank, each in kept.items():
            self._check(set(np.unique(taken[rank])) <= {0, 1}, "taken twice")
            for element, step, _ in each:
                rounds.setdefault(step, set()).add(taken[rank, element])
        # A round is in the results of ranks that are left, or is lost as a whole. With
        # one sum, that to which a rank was adding is lost, and its step used again.
        most = len(self._victims) * (storage == "sum")
        parts = [step for step, found in rounds.items() if len(found) > 1]
        lost = [step for step, found in rounds.items() if found == {0}]
        self._check(len(parts) <= most, f"parts of rounds {parts} are lost")
        if not victims_take:
            self._check(len(parts + lost) <= most, f"rounds {lost} are lost")
        return f"accumulator, {storage}, {len(rounds)} rounds, {len(lost)} lost"

    def _gradient(self, element: int) -> Array:
        gradient = np.zeros((self._group.size, self._number))
        gradient[self._group.rank, element % self._number] = 1
        return gradient

    def _keep(self, element: int, receipt: Any, part: float = 1.0) -> None:
        if receipt:
            self._kept.append(Kept(element, receipt.global_step, part))

    def _drop_stale(self) -> str:
        staleness = int(self._rng.integers(2 * self._group.size))
        opt = hpc.DropStaleGradientOptimizer(
            self._rule, staleness, comm=self._group, host=self._host
        )
        w = hpc.Variable(np.zeros((self._group.size, self._number)), "w")
        self._train(opt, w)
        return f"drop-stale, {self._compare(opt, w)} updates"

    def _agn(self) -> str:
        getter = hpc.AGNCustomGetter(comm=self._group, host=self._host)
        zeros = np.zeros((self._group.size, self._number))
        w = hpc.get_variable("w", zeros, custom_getter=getter)
        period = int(self._rng.choice([1, 2, 4]))
        opt = hpc.AGNOptimizer(
            self._rule, self._group.size, getter, communication_period=period
        )
        self._train(opt, w, period)
        return f"agn, {self._compare(opt, w)} updates"

    def _train(self, opt: Any, w: hpc.Variable, period: int = 1) -> None:
        opt.initialize([w])
        self._begin()
        number = 0
        while number < self._number or self._dies:
            self._pause()
            gradient = self._gradient(number)
            receipt = opt.minimize(lambda gradient=gradient: (0.0, [gradient]))
            number += 1
            if receipt.sent:
                for element in range(number - period, number):
                    self._keep(element, receipt, 1 / period)
        opt.leave()
        self._await_loss()
        opt.free()

    def _compare(self, opt: Any, w: hpc.Variable) -> int:
        """Compare what single gradients have done with the receipts of the others."""
        for rank, kept in self._meet(self._kept).items():
            missing, elements = [], [element for element, _, _ in kept]
            rest = np.delete(w.value[rank], elements)
            self._check(not rest.any(), f"gradients of rank {rank} count, dropped")
            for element, step, part in kept:
                times = opt.global_step - step
                if isinstance(self._rule, hpc.SGD):
                    times = 1
                missing.append(times + w.value[rank, element] / part)
            # The update of a lost gradient is not made, nor that of others by slots.
            most = 0 if isinstance(self._rule, hpc.SGD) else len(self._victims)
            self._check(
                missing == sorted(missing, reverse=True)
                and set(missing) <= set(range(1 + most)),
                f"updates of rank {rank}: {missing} missing",
            )
        return int(opt.global_step)

    def _sync_replicas(self) -> str:
        quorum = int(self._rng.integers(1, 1 + self._group.size))
        opt = hpc.SyncReplicasOptimizer(
            self._rule, quorum, comm=self._group, host=self._host
        )
        steps = self._group.size * self._number
        w = hpc.Variable(np.zeros((self._group.size, steps)), "w")
        opt.initialize([w])
        self._begin()
        number = 0
        while (number < self._number and opt.global_step < steps - 1) or self._dies:
            self._pause()
            gradient = np.zeros(w.value.shape)

            def loss(gradient: Array = gradient) -> tuple[float, list[Array]]:
                # The step of the parameters, which are newer than at the call.
                element = internals.own_step(opt)
                gradient[self._group.rank, element % steps] = 1
                return 0.0, [gradient]

            receipt = opt.minimize(loss)
            if receipt and (step := receipt.global_step) < steps:
                self._keep(step, receipt)
            number += 1
        opt.leave()
        self._await_loss()
        opt.free()
        return f"sync-replicas, quorum {quorum}, {self._compare_means(opt, w)} updates"

    def _compare_means(self, opt: Any, w: hpc.Variable) -> int:
        """Compare the mean of each round with the receipts of the others."""
        rounds: dict[int, list[float]] = {}
        for rank, kept in self._meet(self._kept).items():
            for step, _, _ in kept:
                rounds.setdefault(step, []).append(-w.value[rank, step])
            rest = np.delete(w.value[rank], [step for step, _, _ in kept])
            self._check(not rest.any(), f"gradients of rank {rank} count, dropped")
        for step, parts in rounds.items():
            # A later update may be empty, as its gradients are lost.
            times = [1]
            if isinstance(self._rule, hpc.Momentum):
                last = opt.global_step - step
                times = [last - empty for empty in range(1 + len(self._victims))]
            most = len(parts) + len(self._victims)
            # The numbers of gradients of which it may be the mean.
            numbers = [each / np.array(parts) for each in times]
            self._check(
                any(
                    np.allclose(found, round(found[0]), rtol=1e-9)
                    and len(parts) <= round(found[0]) <= most
                    for found in numbers
                ),
                f"round {step} has {parts}, {times} times",
            )
        return int(opt.global_step)
