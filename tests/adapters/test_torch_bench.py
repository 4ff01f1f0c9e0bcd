"""The benchmark of PyTorch computes the losses of DistributedDataParallel."""

from __future__ import annotations

import pytest

from hpcaccum import group_of
from hpcaccum.bench.measure import WrongAnswerError, measure, rows
from hpcaccum.bench.torch_step import EXCHANGE, TorchStep, gloo

from ..mpi.support import meet
from . import torch_training  # noqa: F401


@pytest.mark.ranks(min=2)
def test_steps_are_verified_and_timed(comm):
    group = group_of(comm)
    with gloo(group):
        case = TorchStep(group, 1 << 16)
        alone, ddp, ours = rows("torch", case, measure(case, "torch", 0.01))
        assert alone.reference
        assert ddp.reference
        assert EXCHANGE in ours.figures

        _, training = case._trainings
        training.losses[2] *= 1.01
        with pytest.raises(WrongAnswerError, match="the losses are"):
            case._check()
        meet()
        case.free()
