"""Compiled functions that compute gradients, and make updates."""

from __future__ import annotations

import contextlib

import pytest
import torch

from .torch_training import STRATEGIES, SYNCHRONOUS, same_everywhere


def compiled(function):
    return torch.compile(function, backend="eager")


def pass_and_step(model, opt):
    @compiled
    def backward(x):
        model(x).square().mean().backward()

    def run(x):
        backward(x)
        opt.step()
        opt.zero_grad()

    return run


def whole(model, opt):
    @compiled
    def run(x):
        with opt.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    return run


def train(kind, comm, make, passes=contextlib.nullcontext):
    """Return the parameters after some steps, with the same data on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with STRATEGIES[kind](inner, comm) as opt:
        run = make(model, opt)
        for step in range(4):
            # The second pass may differ from the first: it finds compiled code.
            torch._dynamo.config.error_on_recompile = step > 1
            with passes():
                run(torch.randn(4, 8))
    return list(model.parameters())


@pytest.fixture(autouse=True)
def _reset():
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def compiled_autograd():
    return torch._dynamo.compiled_autograd._enable(compiled)


# The warning is one of PyTorch about compiled backward passes. What is compiled does
# not depend on the strategy, except that the gradients of CrossShard are means.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("kind", "make", "passes"),
    [
        ("CrossShard", whole, contextlib.nullcontext),
        ("CrossShard", pass_and_step, compiled_autograd),
        ("AGN", pass_and_step, contextlib.nullcontext),
    ],
)
def test_a_compiled_training_is_that_of_plain_pytorch(
    kind, make, passes, comm, monkeypatch
):
    found = train(kind, comm, make, passes)
    if kind in SYNCHRONOUS or comm.size == 1:
        # The same program, not compiled.
        monkeypatch.setitem(globals(), "compiled", lambda function: function)
        expected = train(kind, comm, make)
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-6)
    same_everywhere(*found)
