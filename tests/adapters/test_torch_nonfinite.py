"""Gradients of PyTorch that are not finite, in each strategy, and scaled losses."""

from __future__ import annotations

import pytest
import torch

import hpcaccum.torch as hpt

from ..common import check_error
from ..mpi.support import meet
from ..mpi.training import raised, turns
from .torch_training import STRATEGIES, SYNCHRONOUS, Model, Plain, gradient, groups, sgd

LAST = torch.tensor([4])


def adamw(params):
    return torch.optim.AdamW(params, 0.1)


def spoil(model):
    model.b.grad[2] = torch.inf


def backward(model, rank, step, spoiled):
    """Compute gradients; spoil those of some ranks before they are exchanged."""
    hook = model.b.register_hook(
        lambda grad: grad.index_fill(0, LAST, torch.nan) if rank in spoiled else None
    )
    try:
        model.backward(rank, step)
    finally:
        hook.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_over_the_ranks_whose_gradients_are_finite(dtype, comm, rank, size):
    model = Model(dtype=dtype)
    plain, last = Plain(adamw, model), size - 1
    # No rank; the last one; rank 0; all of them; no rank again.
    spoiled = [[], [last], [0], range(size), []]

    with STRATEGIES["CrossShard"](
        adamw(groups(model)), comm, on_nonfinite="drop"
    ) as opt:
        for step, ranks in enumerate(spoiled):
            backward(model, rank, step, ranks)
            used = [(each, step) for each in range(size) if each not in ranks]
            if used:
                grads = meet(model.w.grad.float().numpy().tobytes())
                assert all(each == grads[0] for each in grads)
                plain.update(used)
            else:
                assert model.w.grad is None
            before = opt.global_step
            receipt = opt.step()
            assert opt.global_step == before + bool(used)
            assert receipt.global_step == before
            assert receipt.reason == ("nonfinite" if rank in ranks else "")
            opt.zero_grad()
        plain.check(model.values(), exact=dtype == torch.float32 and size < 3)
        state = opt.optimizer.state[model.w]
        assert state["step"] == opt.global_step
    nonfinite = [sum(each in ranks for ranks in spoiled) for each in range(size)]
    tally = opt.statistics()
    assert tally.nonfinite == tuple(nonfinite)
    assert tally.accepted == tuple(len(spoiled) - each for each in nonfinite)


def test_step_drops_what_no_backward_pass_has_exchanged(comm, rank, size):
    model = Model()
    plain = Plain(adamw, model)
    with STRATEGIES["CrossShard"](
        adamw(groups(model)), comm, on_nonfinite="drop"
    ) as opt:
        with opt.no_sync():
            model.backward(rank, 0)
        if rank == 0:
            spoil(model)
        assert bool(opt.step()) == (rank > 0)
    if size > 1:
        plain.update([(each, 0) for each in range(1, size)])
    plain.check(model.values())


@pytest.mark.ranks(min=2)
def test_the_mean_of_an_earlier_pass_is_kept(comm, rank, size):
    model = Model()
    with STRATEGIES["CrossShard"](sgd(model), comm, on_nonfinite="drop") as opt:
        # The first pass has the mean of all ranks, 1; the second that of some, 2.
        (model.w.sum() + model.b.sum()).backward()
        if rank == 0:
            spoil(model)
        (2 * model.w.sum() + 2 * model.b.sum()).backward()
        assert bool(opt.step()) == (rank > 0)
    assert torch.equal(model.b, torch.full((5,), -3.0))


def test_raise_is_an_error_on_every_rank(comm, rank, size):
    model = Model()
    with STRATEGIES["CrossShard"](
        adamw(groups(model)), comm, module=model, on_nonfinite="raise"
    ) as opt:
        error = raised(backward, model, rank, 0, [size - 1])
        check_error(error, "the gradient of 'b' has a NaN or an infinity")
        opt.zero_grad()
        assert not model.w.any()
        assert opt.global_step == 0
        model.backward(rank, 0)
        assert opt.step()


def test_accept_is_the_default(comm, rank):
    model = Model()
    with STRATEGIES["CrossShard"](adamw(groups(model)), comm) as opt:
        backward(model, rank, 0, [0])
        assert opt.step()
    assert model.b.isnan().tolist() == [False] * 4 + [True]


def half_rate(params):
    return torch.optim.SGD(params, 0.5)


def backward_scaled(scaler, model, rank, step, bad=False):
    loss = sum(
        (parameter * gradient(name, parameter, rank, step)).sum()
        for name, parameter in model.named_parameters()
    )
    scaler.scale(loss * (float("inf") if bad else 1.0)).backward()


def step_scaled(scaler, opt):
    receipt = scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return bool(receipt)


@pytest.mark.parametrize("kind", SYNCHRONOUS)
@pytest.mark.parametrize("clips", [False, True])
def test_updates_are_those_of_unscaled_gradients(kind, clips, comm, rank, size):
    model, plain = Model(), Plain(half_rate, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with STRATEGIES[kind](half_rate(groups(model)), comm) as opt:
        for step in range(3):
            backward_scaled(scaler, model, rank, step)
            if clips:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            assert step_scaled(scaler, opt)
            plain.update([(each, step) for each in range(size)])
    plain.check(model.values())
    assert scaler.get_scale() == 2048
    assert opt.global_step == 3


def test_all_ranks_skip_a_step_if_the_mean_is_not_finite(comm, rank, size):
    model, plain = Model(), Plain(half_rate, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hpt.CrossShard(half_rate(groups(model)), comm=comm) as opt:
        for step in range(3):
            bad = step == 1 and rank == size - 1
            backward_scaled(scaler, model, rank, step, bad)
            assert step_scaled(scaler, opt) == (step != 1)
            if step != 1:
                plain.update([(each, step) for each in range(size)])
    plain.check(model.values())
    assert scaler.get_scale() == 512
    assert opt.global_step == 2


def test_a_rank_skips_a_gradient_of_its_own_that_is_not_finite(comm, rank, size):
    model, plain = Model(), Plain(half_rate, Model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def act(turn):
        backward_scaled(scaler, model, rank, turn, bad=(rank, turn) == (0, 0))
        return step_scaled(scaler, opt)

    order = [*range(size), *range(size)]
    with hpt.DropStale(half_rate(groups(model)), 10**6, comm=comm) as opt:
        accepted = turns(order, act)
    assert accepted == [False] + [True] * (2 * size - 1)
    for turn, each in enumerate(order):
        if turn:
            plain.update([(each, turn)])
    plain.check(model.values())
    assert opt.global_step == 2 * size - 1
