"""Parameters without a gradient: unused, or with one that is not defined."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.torch as hpt
from tests import internals

from ..mpi.support import meet
from ..mpi.training import check_error, raised
from .torch_training import ONE_SIDED, STRATEGIES, Model, gradient, sgd


def unused(model, rank, step):
    """The loss does not depend on b."""
    return (model.w * gradient("w", model.w, rank, step)).sum()


def full(model, rank, step):
    return (
        unused(model, rank, step) + (model.b * gradient("b", model.b, rank, step)).sum()
    )


class Undefined(torch.autograd.Function):
    """A function of both parameters; returns the given gradient of w, and none of b."""

    @staticmethod
    def forward(ctx, w, b, given):
        ctx.given = given
        return w.sum() + b.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.given, None, None


def undefined(model, rank, step):
    return Undefined.apply(model.w, model.b, gradient("w", model.w, rank, step))


def nothing(model, rank, step):
    return Undefined.apply(model.w, model.b, None)


@pytest.mark.parametrize("loss", [unused, undefined])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_parameter_without_a_gradient_keeps_its_value(kind, loss, comm, rank, size):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        for step in range(2):
            loss(model, rank, step).backward()
            assert model.b.grad is None
            opt.step()
            opt.zero_grad()
    assert not model.b.any()
    assert model.w.any()


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_pass_without_gradients_is_an_error_of_its_rank(kind, comm, rank):
    model = Model()
    with STRATEGIES[kind](sgd(model), comm) as opt:
        nothing(model, rank, 0).backward()
        with pytest.raises(hpc.InvalidArgumentError, match="there is no gradient"):
            opt.step()


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_pass_without_gradients_on_all_ranks(find_unused, comm, rank, size):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm, find_unused=find_unused) as opt:
        nothing(model, rank, 0).backward()
        check_error(raised(opt.step), "there is no gradient")
        full(model, rank, 0).backward()
        opt.zero_grad()
        assert "there is no gradient; call backward()" in str(raised(opt.step))
        full(model, rank, 0).backward()
        opt.step()
    check(model, w=range(size), b=range(size), size=size)


def check(model, size, **ranks):
    """Check that parameters have got the sums of some ranks, divided by ``size``."""
    for name, parameter in model.named_parameters():
        grads = [gradient(name, parameter, rank, 0).double() for rank in ranks[name]]
        expected = -sum(grads, torch.zeros_like(parameter).double()) / size
        np.testing.assert_allclose(parameter.detach().numpy(), expected, atol=1e-6)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("lacking", [unused, undefined, nothing])
def test_a_gradient_of_some_ranks_is_an_error_on_all(lacking, comm, rank, size):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm, module=model) as opt:
        for odd in (0, size - 1):
            error = raised((lacking if rank == odd else full)(model, rank, 0).backward)
            assert type(error) is hpc.DisagreementError
            assert "gradient of b must be the same" in str(error) or lacking is nothing
            assert "find_unused=True" in str(error)
            opt.zero_grad()
        full(model, rank, 0).backward()
        opt.step()
    check(model, size, w=range(size), b=range(size))


@pytest.mark.parametrize("micro", [False, True])
@pytest.mark.parametrize("lacking", [unused, undefined, nothing])
def test_find_unused_takes_zeros_for_ranks_without_a_gradient(
    lacking, micro, comm, rank, size
):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm, find_unused=True) as opt:
        # All ranks have all gradients, then another one lacks some, then all do.
        for odd in (size, 0, size - 1, -1, size):
            with torch.no_grad():
                model.w.zero_()
                model.b.zero_()
            lacks = rank == odd or odd < 0
            have = [each for each in range(size) if each != odd and odd >= 0]
            loss = (lacking if lacks else full)(model, rank, 0)
            if micro:
                with opt.no_sync():
                    loss.backward()
            else:
                loss.backward()
            if not have and lacking is nothing:
                assert type(raised(opt.step)) is hpc.InvalidArgumentError
                continue
            opt.step()
            assert (model.b.grad is None) == (not have)
            opt.zero_grad()
            check(model, size, w=have if lacking is nothing else range(size), b=have)


@pytest.mark.ranks(min=2)
def test_find_unused_when_a_rank_leaves_or_drops(comm, rank, size):
    model = Model()
    options = {"find_unused": True, "on_nonfinite": "drop"}
    with hpt.CrossShard(sgd(model), comm=comm, **options) as opt:
        unused(model, rank, 0).backward()
        opt.zero_grad()
        # The last rank drops its gradients, and only the first one has that of b.
        loss = (full if rank == 0 else unused)(model, rank, 0)
        (loss * (float("nan") if rank == size - 1 else 1)).backward()
        opt.step()
        opt.zero_grad()
        used = range(size - 1)
        check(model, size - 1, w=used, b=[0])
        if rank == 0:
            opt.leave()
        else:
            with torch.no_grad():
                model.w.zero_()
                model.b.zero_()
            (full if rank == size - 1 else unused)(model, rank, 0).backward()
            opt.step()
            check(model, size - 1, w=range(1, size), b=[size - 1])


@pytest.mark.ranks(min=2)
def test_find_unused_with_sparse_gradients(comm, rank, size):
    table, model = torch.nn.Embedding(4, 2, sparse=True), Model()
    torch.nn.init.zeros_(table.weight)
    inner = torch.optim.SGD([*table.parameters(), *model.parameters()], 1.0)
    with hpt.CrossShard(
        inner, comm=comm, sparse=[table.weight], find_unused=True
    ) as opt:
        for _ in range(2):
            loss = full(model, rank, 0)
            if rank == 0:
                loss = loss + table(torch.tensor([1])).sum()
            loss.backward()
            opt.step()
            opt.zero_grad()
    expected = torch.zeros(4, 2)
    expected[1] = -2 / size
    torch.testing.assert_close(table.weight.detach(), expected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError("no")])
def test_any_error_in_a_hook_is_raised_on_all_ranks(error, comm, rank, monkeypatch):
    model = Model()
    with hpt.CrossShard(sgd(model), comm=comm) as opt:
        if rank == 1:

            def start(*args, **options):
                raise error

            monkeypatch.setattr(internals.reducer(opt), "start", start)
        found = raised(full(model, rank, 0).backward)
        assert isinstance(found, type(error) if rank == 1 else RuntimeError)
        assert "no" in str(found)
        monkeypatch.undo()
        meet()
        opt.zero_grad()
        full(model, rank, 0).backward()
        opt.step()
