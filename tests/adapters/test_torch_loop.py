"""What training loops do with an optimizer and its gradients, in each strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt
from hpcaccum.torch import adapter

from ..mpi.support import meet
from ..mpi.training import raised
from .torch_training import (
    STRATEGIES,
    SYNCHRONOUS,
    Model,
    by_turns,
    gradient,
    same_everywhere,
    sgd,
)


def total(name, like, at):
    return sum(gradient(name, like, *each).double() for each in at)


def mean(name, like, at):
    return total(name, like, at) / len(at)


def check_values(model, expected):
    for name, parameter in model.named_parameters():
        found = parameter.detach().double().numpy()
        np.testing.assert_allclose(found, expected(name, parameter), atol=1e-6)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_scheduler_of_either_optimizer_sets_the_rate(kind, held, comm, rank, size):
    model = Model()
    inner = sgd(model)
    with STRATEGIES[kind](inner, comm) as opt:
        scheduler = torch.optim.lr_scheduler.StepLR(inner if held else opt, 1, 0.5)
        for _ in range(2):
            for _ in range(2 if kind == "AGN" else 1):
                (model.w.sum() + model.b.sum()).backward()
                opt.step()
                opt.zero_grad()
            # The center has the host's rate.
            meet()
            scheduler.step()
            meet()
        assert opt.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.25
    updates = 1 if kind in SYNCHRONOUS else size
    check_values(model, lambda _, like: np.full(like.shape, -1.5 * updates))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_rate_that_one_rank_changes_is_found(groups, comm, rank, size):
    """As a scheduler does that looks at a loss which is not the same on all ranks."""
    model = Model()
    parts = [[model.w, model.b]] if groups == 1 else [[model.w], [model.b]]
    inner = torch.optim.SGD([{"params": part} for part in parts], 1.0)
    with hpt.CrossShard(inner, comm=comm) as opt:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        scheduler.step(1.0)
        scheduler.step(2.0 if rank == size - 1 else 0.5)
        loss = model.w.sum() + model.b.sum()
        error = raised(loss.backward)
        assert type(error) is hpc.DisagreementError
        name = "learning rate" + " of parameter group 0" * (groups == 2)
        text = f"{name} must be the same on all {size} ranks: rank 0 has 1, rank "
        assert f"{text}{size - 1} has 0.1" in str(error)
        # All go on when they have the same.
        for group in opt.param_groups:
            group["lr"] = 0.5
        opt.zero_grad()
        (model.w.sum() + model.b.sum()).backward()
        opt.step()
    check_values(model, lambda _, like: np.full(like.shape, -0.5))


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_clipping_changes_what_is_applied(kind, comm, rank, size):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        model.backward(rank, 0)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()

    def clipped(at):
        means = {n: mean(n, p, at) for n, p in model.named_parameters()}
        norm = float(sum((each**2).sum() for each in means.values())) ** 0.5
        return {n: each * min(1, 0.5 / (norm + 1e-6)) for n, each in means.items()}

    ranks = [(each, 0) for each in range(size)]
    # The mean is clipped if the exchange precedes it, else each gradient.
    parts = [clipped(ranks)] if kind == "CrossShard" else [clipped([r]) for r in ranks]
    check_values(model, lambda name, _: -sum(p[name] for p in parts) / len(parts))


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_micro_batches_are_added_and_exchanged_once(kind, comm, rank, size):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        with opt.no_sync():
            model.backward(rank, 0)
            own = gradient("w", model.w, rank, 0)
            assert torch.equal(model.w.grad, own)
            model.backward(rank, 1, "w")
        model.backward(rank, 2, "b")
        opt.step()
        assert opt.global_step == 1
    passes = {"w": [0, 1], "b": [0, 2]}
    check_values(
        model,
        lambda name, like: (
            -sum(
                mean(name, like, [(r, step) for r in range(size)])
                for step in passes[name]
            )
        ),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_dtypes(kind, dtype, comm, rank, size):
    model = Model(dtype=dtype)
    passes = 2 if kind == "AGN" else 1
    with STRATEGIES[kind](sgd(model), comm) as opt:

        def act(_):
            for _ in range(passes):
                model.backward(rank, 0)
                opt.step()
                opt.zero_grad()

        by_turns(kind, size, act)
    assert model.w.dtype == dtype
    grads = [gradient("w", model.w, each, 0).double() for each in range(size)]
    expected = -sum(grads) / (size if kind in SYNCHRONOUS else 1)
    found = model.w.detach().double().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["average", "broadcast"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_buffers_of_the_module(kind, mode, comm, rank, size):
    module = torch.nn.BatchNorm1d(2, momentum=1.0)
    module.running_mean.fill_(7 + rank)
    module.register_buffer("mask", torch.tensor([rank == 0, True]))
    module.register_buffer("assigned", torch.zeros(1))
    with STRATEGIES[kind](sgd(module), comm, module=module, buffers=mode) as opt:
        assert module.running_mean.eq(7).all()
        assert module.mask.all()
        for _ in range(rank + 1):
            module(torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + rank).sum().backward()
            opt.step() if kind == "AGN" else opt.zero_grad()
            if kind == "CrossShard":
                break
        module.assigned = module.assigned + rank
        # The batch of rank r has the means 1 + r and 2 + r.
        opt.sync_buffers()
        late = (size - 1) / 2 if mode == "average" else 0
        assert torch.allclose(module.running_mean, torch.tensor([1.0, 2.0]) + late)
        assert torch.allclose(
            module.assigned, torch.tensor([late], dtype=torch.float32)
        )
        assert module.num_batches_tracked == 1


@pytest.fixture
def warned():
    # Earlier tests may have been warned.
    adapter._warn_of_no_module.cache_clear()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", STRATEGIES)
def test_without_a_module_a_job_is_warned_once(kind, comm, rank, caplog, warned):
    given = {"module": Model()}, {"module": None}, {}, {}
    counts = []
    for options in given:
        STRATEGIES[kind](sgd(Model()), comm, **options).free()
        counts.append(sum(meet(len(caplog.records))))
    assert counts == [0, 0, 1, 1]
    for record in caplog.records:
        assert "without module=model, buffers" in record.getMessage()
        assert "parameters outside the optimizer" in record.getMessage()


@pytest.mark.parametrize("kind", STRATEGIES)
def test_frozen_parameters_and_buffers_are_those_of_rank_0(kind, comm, rank):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].requires_grad_(False)
    model[1].running_mean += rank
    inner = torch.optim.SGD(model[1].parameters(), 0.1)
    with STRATEGIES[kind](inner, comm, module=model) as opt:
        model(torch.randn(4, 2)).square().sum().backward()
        opt.step()
        with pytest.raises(hpc.InvalidArgumentError, match="no such parameter"):
            opt.center(model[0].weight)
    same_everywhere(*model.state_dict().values())


def test_a_parameter_that_is_trained_later_is_averaged_in_its_pass(comm, rank, size):
    model = Model()
    model.b.requires_grad_(False)
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        model.backward(rank, 0, "w")
        model.b.requires_grad_(True)
        for step in range(2):
            model.backward(rank, step, "b")
            found = model.b.grad * size
            at = [(each, s) for each in range(size) for s in range(step + 1)]
            assert torch.allclose(found.double(), total("b", model.b, at))
        opt.step()
    at = {"w": [(each, 0) for each in range(size)], "b": at}
    check_values(model, lambda name, like: -total(name, like, at[name]) / size)


@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_hook_that_is_added_later_may_change_gradients(kind, comm, rank, size):
    """Also if the exchange of large gradients begins before the pass has ended."""

    def hook(parameter):
        parameter.grad.mul_(0.5)

    model = torch.nn.ParameterList(torch.zeros(200_000) for _ in range(2))
    with STRATEGIES[kind](sgd(model), comm) as opt:
        for parameter in model:
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            sum(parameter.sum() for parameter in model).backward()
            # No rank is late.
            meet()
            opt.step()
            opt.zero_grad()
    assert all(parameter.eq(-1).all() for parameter in model)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_loss_may_have_gradients_of_an_earlier_pass(kind, comm, rank, size):
    model, plain = (torch.nn.ParameterList([torch.ones(3)]) for _ in range(2))

    def loss(model, rank):
        return (model[0] ** 3).sum() * (rank + 1)

    with STRATEGIES[kind](sgd(model), comm) as opt:
        loss(model, rank).backward(create_graph=True)
        model[0].grad.sum().backward()
        opt.step()
    (sum(loss(plain, each) for each in range(size)) / size).backward(create_graph=True)
    plain[0].grad.sum().backward()
    torch.testing.assert_close(model[0], plain[0] - plain[0].grad)


class Failing(torch.autograd.Function):
    """The identity; its gradient is an error."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError


def fail(model):
    """Begin a backward pass that ends after the gradient of w."""
    with pytest.raises(ArithmeticError):
        (Failing.apply(model.b.sum()) + (model.w * 5).sum()).backward()
    assert model.w.grad.eq(5).all()
    assert model.b.grad is None


@pytest.mark.parametrize("fails", ["one rank", "all ranks"])
@pytest.mark.parametrize("then", ["backward", "no_sync", "other", "step"])
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_the_pass_after_one_that_failed(kind, then, fails, comm, rank, size):
    model = Model()
    names = "b" if then == "other" else "wb"
    with STRATEGIES[kind](sgd(model), comm) as opt:
        if fails == "all ranks" or rank == size - 1:
            fail(model)
        model.zero_grad() if rank % 2 else opt.zero_grad()
        if then == "step":
            for name, each in model.named_parameters():
                each.grad = gradient(name, each, rank, 0)
        elif then == "no_sync":
            with opt.no_sync():
                model.backward(rank, 0)
        else:
            model.backward(rank, 0, names)
        opt.step()
        opt.zero_grad()
        model.backward(rank, 1, names)
        opt.step()
    at = [(each, step) for each in range(size) for step in range(2)]
    check_values(model, lambda n, p: -total(n, p, at) / size * (n in names))
