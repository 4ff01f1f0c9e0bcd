"""A state dictionary is of one step; training continues from it with the same bits."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt

from ..mpi.support import meet
from ..mpi.training import raised, turns
from .torch_training import ONE_SIDED, STRATEGIES, Model, groups


def adamw(model):
    return torch.optim.AdamW(groups(model), 0.1)


def train(opt, model, kind, rank, size, steps):
    """Make steps, of one rank after the other unless they are synchronous."""
    for step in steps:

        def act(_, step=step):
            model.backward(rank, step)
            opt.step()
            opt.zero_grad()

        if kind in ONE_SIDED and kind != "SyncReplicas":
            turns(range(size), act)
        else:
            act(0)


def saved(opt, rank):
    """Return the state of rank 0 as a file would hold it; None on other ranks."""
    meet()
    state = None
    if rank == 0:
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    meet()
    return state


@pytest.mark.parametrize("kind", [k for k in STRATEGIES if k != "AGN"])
def test_training_continues_with_the_same_bits(kind, comm, rank, size):
    model, other = Model(), Model(start=9.0)
    with STRATEGIES[kind](adamw(model), comm) as opt:
        train(opt, model, kind, rank, size, range(2))
        opt.param_groups[0]["lr"] = 0.25
        state, updates = saved(opt, rank), opt.global_step
        meet()
        train(opt, model, kind, rank, size, range(2, 4))
    with STRATEGIES[kind](adamw(other), comm) as opt:
        train(opt, other, kind, rank, size, range(1))
        opt.load_state_dict(state)
        assert opt.param_groups[0]["lr"] == 0.25
        assert opt.global_step == updates
        assert sum(opt.statistics().accepted) == 2 * size
        meet()
        train(opt, other, kind, rank, size, range(2, 4))
    assert torch.equal(model.w, other.w)
    assert torch.equal(model.b, other.b)


def test_agn_continues_from_the_center(comm, rank, size):
    model, other = Model(), Model(start=9.0)
    with STRATEGIES["AGN"](adamw(model), comm) as opt:
        train(opt, model, "AGN", rank, size, range(4))
        state, center = saved(opt, rank), opt.center(model.w)
    with STRATEGIES["AGN"](adamw(other), comm) as opt:
        train(opt, other, "AGN", rank, size, range(1))
        opt.load_state_dict(state)
        assert torch.equal(other.w, center)
        assert opt.global_step == 2 * size
        # The moments of the center, and none of local steps.
        assert not opt.state
        if rank == 0:
            found, expected = opt.state_dict()["state"], state["state"]
            assert torch.equal(found[0]["exp_avg"], expected[0]["exp_avg"])


@pytest.mark.parametrize("kind", STRATEGIES)
def test_the_state_is_of_the_step_of_the_parameters(kind, comm, rank, size):
    model = Model()
    with STRATEGIES[kind](adamw(model), comm) as opt:
        train(opt, model, kind, rank, size, range(2))
        state = saved(opt, rank)
    if rank == 0:
        assert state["state"][0]["step"] == state["global_step"] == opt.global_step
        np.testing.assert_array_equal(
            state["parameters"]["parameter 0"], model.w.detach()
        )


def test_plain_pytorch_loads_it(comm, rank, size):
    model = Model()
    with hpt.SyncReplicas(adamw(model), size, comm=comm) as opt:
        model.backward(rank, 0)
        opt.step()
        state = saved(opt, rank)
    if rank == 0:
        plain = adamw(Model())
        plain.load_state_dict(state)
        assert plain.state_dict()["state"][1]["step"] == 1


def test_before_the_first_update_there_is_no_state(comm, rank):
    model, other = Model(), Model(start=9.0)
    with hpt.CrossShard(adamw(model), comm=comm) as opt:
        state = saved(opt, rank)
    with hpt.CrossShard(adamw(other), comm=comm) as opt:
        opt.load_state_dict(state)
    assert torch.equal(other.w, model.w)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_only_the_host_can_save(kind, comm, rank):
    with STRATEGIES[kind](adamw(Model()), comm) as opt:
        if rank == 1:
            with pytest.raises(hpc.InvalidArgumentError, match="that of rank 0"):
                opt.state_dict()


@pytest.mark.parametrize("kind", ["CrossShard", "DropStale"])
def test_a_state_that_does_not_fit_changes_nothing(kind, comm, rank, size):
    model = Model()
    model.backward(0, 0)
    with STRATEGIES[kind](adamw(model), comm) as opt:
        train(opt, model, kind, rank, size, range(1))
        state = opt.state_dict() if rank == 0 else None
        before = model.values()

        def refused(**changes):
            wrong = {**state, **changes} if rank == 0 else None
            return raised(opt.load_state_dict, wrong)

        error = refused(optimizer="Adam")
        assert isinstance(error, hpc.InvalidArgumentError)
        assert "is of Adam, the optimizer is AdamW" in str(error)
        error = refused(parameters={"w": torch.zeros(2)})
        assert "different parameters: float32 (2,) in groups of 1, 1;" in str(error)
        error = raised(opt.load_state_dict, {"state": {}} if rank == 0 else None)
        assert isinstance(error, TypeError)
        assert np.array_equal(model.values()["w"], before["w"])
        assert opt.global_step > 0
        train(opt, model, kind, rank, size, range(1, 2))
