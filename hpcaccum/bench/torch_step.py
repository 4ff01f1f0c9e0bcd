"""A training step of PyTorch, compared with DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcaccum import Group, InvalidArgumentError
from hpcaccum.bench.measure import Case, Memory, WrongAnswerError, repeated
from hpcaccum.bench.report import Columns, figure
from hpcaccum.mpi import MPI

_LAYERS, _SAMPLES = 3, 8
_RATE = 2.0**-10
# Steps whose losses are compared, and the relative difference that rounding may make.
_COMPARED, _ROUNDING = 3, 1e-4

# Milliseconds, and the ratio to them of DDP.
EXCHANGE, RATIO = "ms in the exchange", "times less than DDP"


class TorchStep(Case):
    """Steps of a model of PyTorch: forward, backward, and an update by SGD.

    - ``alone``: every rank without the others.
    - ``DDP``: DistributedDataParallel averages the gradients with gloo.
    - ``cross-shard``: `hpcaccum.torch.CrossShard` does.

    The exchange overlaps with the backward pass. Its time is therefore that of a step,
    less the time of one of ``alone``.
    """

    help = "a training step of PyTorch, compared with DistributedDataParallel"
    # 1 to 50 million parameters.
    sizes = "4M:64M,192M"
    memory = Memory(shared=1, shared_first=1, private=10)
    columns = Columns(
        "a step of all ranks; n: samples\n"
        "exchange: how many ms longer than a step of a rank alone\n"
        "vs DDP: times less time in the exchange than DistributedDataParallel with "
        "gloo",
        (figure("exchange", 8, EXCHANGE), figure("vs DDP", 6, RATIO)),
    )

    def _prepare(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        import hpcaccum.torch

        train = functools.partial(_Training, self.rank, self.count)
        # Without a copy from its buckets to the gradients.
        views = {"gradient_as_bucket_view": True}
        ddp = train(wrap=functools.partial(DistributedDataParallel, **views))
        cross_shard = hpcaccum.torch.CrossShard
        ours = train(hold=functools.partial(cross_shard, comm=self.group, module=None))
        self._hold(ours.optimizer)
        self._trainings = ddp, ours
        self._add("alone", repeated(train()), reference=True, bus=0)
        for name, training, more in (
            ("DDP", ddp, {"reference": True}),
            ("cross-shard", ours, {"raw": "DDP", "check": self._check}),
        ):
            figures = functools.partial(_figures, name)
            self._add(name, repeated(training), bus=0, figures=figures, **more)

    def _check(self) -> None:
        for training in self._trainings:
            while len(training.losses) < _COMPARED:
                training()
        wanted, found = (each.losses[:_COMPARED] for each in self._trainings)
        pairs = zip(found, wanted, strict=True)
        if not all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs):
            raise WrongAnswerError(f"the losses are {found}, those of DDP {wanted}")


def _figures(name: str, medians: Mapping[str, float]) -> dict[str, float]:
    seconds = {each: medians[each] - medians["alone"] for each in ("DDP", name)}
    # Where nothing is to be seen of the exchange, there is no ratio.
    found = {EXCHANGE: 1e3 * seconds[name]}
    if min(seconds.values()) > 0:
        found[RATIO] = seconds["DDP"] / seconds[name]
    return found


class _Training:
    """A model, the same on all ranks, its data and its optimizer. Collective."""

    def __init__(
        self,
        rank: int,
        parameters: int,
        wrap: Callable[[Any], Any] = lambda model: model,
        hold: Callable[[Any], Any] = lambda optimizer: optimizer,
    ) -> None:
        import torch

        torch.manual_seed(0)
        width = max(1, math.isqrt(parameters // _LAYERS))
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width) for _ in range(_LAYERS))
        )
        self._model = wrap(model)
        self.optimizer = hold(torch.optim.SGD(model.parameters(), _RATE))
        # Each rank has its own data.
        torch.manual_seed(1 + rank)
        self._x, self._y = torch.randn(2, _SAMPLES, width)
        self._criterion = torch.nn.MSELoss()
        self.losses: list[float] = []

    def __call__(self) -> None:
        loss = self._criterion(self._model(self._x), self._y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def check_usable(what: str) -> None:
    """Raise InvalidArgumentError if torch is missing, or cannot be loaded."""
    try:
        importlib.import_module("torch.distributed")
    except (ImportError, OSError) as error:
        raise InvalidArgumentError(
            f"{what} needs PyTorch: {error} (pip install torch)"
        ) from None


@contextlib.contextmanager
def gloo(group: Group) -> Iterator[None]:
    """Have a process group of gloo, of all ranks, inside the block. Collective."""
    import torch
    import torch.distributed as distributed

    # As many as the other kinds use.
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    host = "127.0.0.1" if group.single_node else MPI.Get_processor_name()
    address = group.comm.bcast(f"tcp://{host}:{port}")
    distributed.init_process_group(
        "gloo", init_method=address, rank=group.rank, world_size=group.size
    )
    yield
    distributed.destroy_process_group()
