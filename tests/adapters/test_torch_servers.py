"""A center of PyTorch whose parameters are on several servers."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import hpcaccum.torch as hpt

from ..mpi.on_nodes import group_on_nodes  # noqa: F401
from ..mpi.support import meet
from .torch_training import Model, check_continues, groups

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
    # Its state has other shapes than the parameters.
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.1),
    # It has state before the first update.
    "Adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
}


def leaders(group):
    """Return a server on each node; the last is the host."""
    return [ranks[0] for ranks in reversed(group.nodes)]


def train(rank, opt, model, steps):
    """Make synchronous steps; in step 1, a parameter has no gradient."""
    for step in steps:
        model.backward(rank, step, "w" if step == 1 else "wb")
        opt.step()
        opt.zero_grad()


def start(name, group, servers, **options):
    model = Model(start=group.rank)
    inner = OPTIMIZERS[name](groups(model))
    opt = hpt.SyncReplicas(inner, group.size, comm=group, servers=servers, **options)
    return opt, model


def same(one, other):
    assert one.keys() == other.keys()
    assert one["state"].keys() == other["state"].keys()
    assert (one["global_step"], one["tally"]) == (other["global_step"], other["tally"])
    for name, value in one["parameters"].items():
        assert torch.equal(value, other["parameters"][name])
    for number, parts in one["state"].items():
        assert parts.keys() == other["state"][number].keys()
        for part, value in parts.items():
            assert torch.equal(value, other["state"][number][part])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_and_state_are_those_of_one_server(name, group):
    servers = leaders(group)
    states, values = [], []
    for each in (servers[0], servers):
        opt, model = start(name, group, each)
        # All ranks start with the host's parameters.
        assert model.w.eq(servers[0]).all()
        train(group.rank, opt, model, range(3))
        meet()
        if group.rank == servers[0]:
            states.append(opt.state_dict())
        meet()
        train(group.rank, opt, model, range(3, 4))
        opt.free()
        values.append(model.values())

    for each, value in values[0].items():
        np.testing.assert_array_equal(values[1][each], value)
    if states:
        same(*states)
        assert states[0]["global_step"] == 3


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_a_state_continues_on_other_servers(name, group, several):
    servers = leaders(group)
    choices = [servers[0], servers] if several else [servers, servers[0]]
    check_continues(
        lambda number: start(name, group, choices[number]),
        functools.partial(train, group.rank),
        group.rank,
        servers[0],
    )


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_scheduler_of_the_host_sets_the_rate_of_all_servers(kind, group):
    servers, model, rate = leaders(group), Model(), kind(1.0)
    inner = torch.optim.SGD(
        [{"params": [model.w]}, {"params": [model.b], "lr": 4.0}], rate
    )
    opt = hpt.SyncReplicas(inner, group.size, comm=group, servers=servers)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for _ in range(3):
        (model.w.sum() + model.b.sum()).backward()
        opt.step()
        meet()
        if group.rank == servers[0]:
            scheduler.step()
        meet()
    opt.free()

    assert model.w.eq(-1.75).all()
    assert model.b.eq(-7).all()
