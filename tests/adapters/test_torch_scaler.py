"""Gradients of scaled losses, as mixed precision needs them."""

from __future__ import annotations

import pytest
import torch

import hpcaccum.torch as hpt

from ..mpi.training import turns
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, Plain, gradient, groups


def sgd(params):
    return torch.optim.SGD(params, 0.5)


def backward(scaler, model, rank, step, factor=1.0):
    loss = sum(
        (parameter * gradient(name, parameter, rank, step)).sum()
        for name, parameter in model.named_parameters()
    )
    scaler.scale(loss * factor).backward()


@pytest.mark.parametrize("kind", SYNCHRONOUS)
@pytest.mark.parametrize("clips", [False, True])
def test_updates_are_those_of_unscaled_gradients(kind, clips, comm, rank, size):
    model, plain = Model(), Plain(sgd, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with STRATEGIES[kind](sgd(groups(model)), comm) as opt:
        for step in range(3):
            backward(scaler, model, rank, step)
            if clips:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            assert scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            plain.update([(each, step) for each in range(size)])
    plain.check(model.values())
    assert scaler.get_scale() == 2048
    assert opt.global_step == 3


def test_all_ranks_skip_a_step_if_the_mean_is_not_finite(comm, rank, size):
    model, plain = Model(), Plain(sgd, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hpt.CrossShard(sgd(groups(model)), comm=comm) as opt:
        for step in range(3):
            bad = step == 1 and rank == size - 1
            backward(scaler, model, rank, step, float("inf") if bad else 1.0)
            receipt = scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            assert bool(receipt) == (step != 1)
            if step != 1:
                plain.update([(each, step) for each in range(size)])
    plain.check(model.values())
    assert scaler.get_scale() == 512
    assert opt.global_step == 2


def test_a_rank_skips_a_gradient_of_its_own_that_is_not_finite(comm, rank, size):
    model, plain = Model(), Plain(sgd, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def act(turn):
        bad = (rank, turn) == (0, 0)
        backward(scaler, model, rank, turn, float("inf") if bad else 1.0)
        receipt = scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return bool(receipt)

    order = [*range(size), *range(size)]
    with hpt.DropStale(sgd(groups(model)), 10**6, comm=comm) as opt:
        accepted = turns(order, act)
    assert accepted == [False] + [True] * (2 * size - 1)
    for turn, each in enumerate(order):
        if turn:
            plain.update([(each, turn)])
    plain.check(model.values())
    assert opt.global_step == 2 * size - 1
