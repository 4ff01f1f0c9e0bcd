"""The benchmark of PyTorch computes the losses of DistributedDataParallel."""

from __future__ import annotations

import pytest

from hpcaccum import Group
from hpcaccum.bench.measure import Conditions, Measurement, WrongAnswerError, rows
from hpcaccum.bench.references import Gloo
from hpcaccum.bench.torch_step import EXCHANGE, TorchStep

from ..mpi.support import meet
from . import torch_training  # noqa: F401


@pytest.mark.ranks(min=2)
def test_steps_are_verified_and_timed(comm, rank, size):
    group = Group.of(comm)
    gloo = Gloo(group)
    case = TorchStep(group, 1 << 16, Conditions(0.01, gloo))
    times = Measurement(group, "torch", case, 0.01)()
    alone, ddp, ours = rows("torch", 1 << 16, size, case.kinds, times)
    assert alone.reference
    assert ddp.reference
    assert EXCHANGE in ours.figures

    case._ours.losses[2] *= 1.01
    with pytest.raises(WrongAnswerError, match="the losses are"):
        case._check()
    meet()
    case.free()
    gloo.free()
