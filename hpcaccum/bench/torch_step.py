"""A training step of PyTorch, compared with DistributedDataParallel."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, ClassVar

from hpcaccum.bench.measure import Kind, Memory, WrongAnswerError
from hpcaccum.bench.report import Columns, figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hpcaccum import Group
    from hpcaccum.bench.measure import Conditions

_LAYERS, _SAMPLES = 3, 8
# A power of two.
_RATE = 2.0**-10
# Steps whose losses are compared, and the relative difference that rounding may make.
_COMPARED, _ROUNDING = 3, 1e-4

# Milliseconds, and the ratio to them of DDP.
EXCHANGE, RATIO = "ms in the exchange", "times less than DDP"

COLUMNS = Columns(
    "a step of all ranks; n: samples\n"
    "exchange: how many ms longer than a step of a rank alone\n"
    "vs DDP: times less time in the exchange than DistributedDataParallel with gloo",
    (figure("exchange", 8, EXCHANGE), figure("vs DDP", 6, RATIO)),
)


class TorchStep:
    """Steps of a model of PyTorch: forward, backward, and an update by SGD.

    - ``alone``: every rank without the others.
    - ``DDP``: DistributedDataParallel averages the gradients with gloo.
    - ``cross-shard``: `hpcaccum.torch.CrossShard` does.

    The exchange overlaps with the backward pass. Its time is therefore that of a step,
    less the time of one of ``alone``.

    Args:
        group: The ranks.
        nbytes: Of the parameters, in three layers.
        conditions: Has a process group of gloo.
    """

    least_ranks: ClassVar[int] = 2
    memory: ClassVar[Memory] = Memory(shared=1, shared_first=1, private=10)

    def __init__(self, group: Group, nbytes: int, conditions: Conditions) -> None:
        assert conditions.gloo is not None
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import hpcaccum.torch

        parameters = nbytes // 4

        def distributed(model: Any) -> Any:
            # Without a copy from its buckets to the gradients.
            return DistributedDataParallel(model, gradient_as_bucket_view=True)

        self._alone = _Training(torch, group.rank, parameters)
        self._ddp = _Training(torch, group.rank, parameters, wrap=distributed)
        self._ours = _Training(
            torch,
            group.rank,
            parameters,
            hold=lambda optimizer: hpcaccum.torch.CrossShard(
                optimizer, comm=group, module=None
            ),
        )
        common: Any = {"bus": 0.0}
        self.kinds = [
            Kind("alone", self._alone.run, reference=True, **common),
            Kind(
                "DDP",
                self._ddp.run,
                reference=True,
                figures=lambda medians: _figures("DDP", medians),
                **common,
            ),
            Kind(
                "cross-shard",
                self._ours.run,
                self._check,
                raw="DDP",
                figures=lambda medians: _figures("cross-shard", medians),
                **common,
            ),
        ]

    def _check(self) -> None:
        for training in (self._ddp, self._ours):
            training.run(max(0, _COMPARED - len(training.losses)))
        found = self._ours.losses[:_COMPARED]
        wanted = self._ddp.losses[:_COMPARED]
        pairs = zip(found, wanted, strict=True)
        if not all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs):
            raise WrongAnswerError(f"the losses are {found}, those of DDP {wanted}")

    def forget(self) -> None:
        """Do nothing: each step changes the parameters."""

    def free(self) -> None:
        """Free the exchange. Collective."""
        self._ours.optimizer.free()


def _figures(name: str, medians: Mapping[str, float]) -> dict[str, float]:
    seconds = {each: medians[each] - medians["alone"] for each in ("DDP", name)}
    # Where nothing is to be seen of the exchange, there is no ratio.
    found = {EXCHANGE: 1e3 * seconds[name]}
    if min(seconds.values()) > 0:
        found[RATIO] = seconds["DDP"] / seconds[name]
    return found


class _Training:
    """A model, its data and its optimizer; the same model on all ranks. Collective.

    Args:
        torch: The module.
        rank: Each rank has its own data.
        parameters: Of the model, about.
        wrap: Returns what computes the output in place of the model.
        hold: Returns what takes the place of the optimizer.

    Attributes:
        optimizer: What `hold` returned.
        losses: Of this rank, one for each step.
    """

    def __init__(
        self,
        torch: Any,
        rank: int,
        parameters: int,
        wrap: Callable[[Any], Any] = lambda model: model,
        hold: Callable[[Any], Any] = lambda optimizer: optimizer,
    ) -> None:
        torch.manual_seed(0)
        width = max(1, math.isqrt(parameters // _LAYERS))
        layers = [torch.nn.Linear(width, width) for _ in range(_LAYERS)]
        model = torch.nn.Sequential(*layers)
        self._model = wrap(model)
        self.optimizer = hold(torch.optim.SGD(model.parameters(), _RATE))
        torch.manual_seed(1 + rank)
        self._x, self._y = torch.randn(2, _SAMPLES, width)
        self._criterion = torch.nn.MSELoss()
        self.losses: list[float] = []

    def run(self, inner: int) -> list[float]:
        """Return the seconds of a step."""
        begun = time.perf_counter()
        for _ in range(inner):
            loss = self._criterion(self._model(self._x), self._y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return [(time.perf_counter() - begun) / max(1, inner)]
