"""The benchmark of PyTorch computes the losses of DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccum import group_of
from hpcaccum.bench.measure import WrongAnswerError, measure, rows
from hpcaccum.bench.torch_step import EXCHANGE, TorchStep, gloo

from ..common import json_lines, status_of
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


@pytest.mark.ranks(min=2)
def test_the_reducer_is_compared_with_gloo(tmp_path):
    path = meet(str(tmp_path / "rows.json"))[0]
    words = "bench allreduce --against gloo --sizes 4K --seconds 0.01 --json"
    assert status_of(*words.split(), path) in (None, 0)
    meet()
    [row] = [row for row in json_lines(Path(path)) if row["name"] == "gloo"]
    assert row["reference"]
