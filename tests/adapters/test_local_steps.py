"""Local steps of PyTorch and JAX, compared with those of NumPy."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.jax
import hpcaccum.torch as hpt

from ..common import check_error
from ..mpi import reducing
from ..mpi.on_nodes import group_on_nodes  # noqa: F401
from ..mpi.support import meet
from ..mpi.training import raised
from .torch_training import Model, groups

SHAPES = {"a": (3, 400), "b": (900,), "c": (2, 2)}
PERIOD, CALLS = 3, 8
FRAGMENTS = {"fragments": 2, "overlap": 1}
# Options, and the calls that push.
PUSHES = [({}, {3, 6}), (FRAGMENTS, {1, 3, 4, 6, 7})]


drawn = functools.partial(reducing.drawn, SHAPES, dtype=np.float32)


def expected(comm, rank, size, **options):
    """Return the values of this rank after each call, and the center at the end."""
    variables = [hpc.Variable(each, name) for name, each in drawn(9).items()]
    rules = hpc.Momentum(0.1, 0.5), hpc.Momentum(0.5, 0.5, use_nesterov=True)
    found = []
    options = {**options, "quorum": size, "servers": 0, "comm": comm}
    with hpc.LocalStepsOptimizer(*rules, PERIOD, **options) as opt:
        for call in range(CALLS):
            loss = 0.0, drawn(rank, call)
            opt.minimize(lambda loss=loss: loss, var_list=variables)
            found.append([var.value.copy() for var in variables])
    return found, [var.value.copy() for var in variables]


def close(found, wanted, rtol=2e-6):
    for array, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(array), other, rtol=rtol, atol=rtol)


def outer(params):
    return torch.optim.SGD(params, 0.5, momentum=0.5, nesterov=True)


class Module(torch.nn.Module):
    """The same variables, with given gradients."""

    def __init__(self):
        super().__init__()
        for name, array in drawn(9).items():
            setattr(self, name, torch.nn.Parameter(torch.from_numpy(array)))

    def take(self, grads):
        for name, parameter in self.named_parameters():
            parameter.grad = torch.from_numpy(grads[name])

    def values(self):
        return [each.detach().numpy().copy() for each in self.parameters()]


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
@pytest.mark.parametrize(("options", "pushes"), PUSHES)
def test_torch(group, rank, size, wire, options, pushes):
    name = wire and "bfloat16"
    found, last = expected(group, rank, size, wire_dtype=name, **options)
    module = Module()
    inner = torch.optim.SGD(module.parameters(), 0.1, momentum=0.5)
    options = {**options, "quorum": size, "comm": group, "servers": 0}
    with hpt.LocalSteps(inner, outer, PERIOD, wire_dtype=wire, **options) as opt:
        for call in range(CALLS):
            module.take(drawn(rank, call))
            assert opt.step().sent == (call + 1 in pushes)
            if wire is None:
                close(module.values(), found[call])
        if rank == 0:
            saved = opt.state_dict()
            assert saved["global_step"] == len(pushes)
            assert len(saved["state"]) == 3
            # It is that of the outer optimizer.
            assert saved["param_groups"][0]["nesterov"]
            assert all("momentum_buffer" in each for each in saved["state"].values())
        meet()
        opt.load_state_dict(saved if rank == 0 else None)
        assert opt.global_step == len(pushes)
    close(module.values(), last, 2e-6 if wire is None else 2.0**-7)


@pytest.mark.parametrize(("options", "pushes"), PUSHES)
def test_jax(comm, rank, size, options, pushes):
    found, last = expected(comm, rank, size, **options)
    inner = optax.sgd(0.1, momentum=0.5)
    rule = optax.sgd(0.5, momentum=0.5, nesterov=True)
    options = {**options, "quorum": size, "comm": comm}
    start = {name: jnp.asarray(each) for name, each in drawn(9).items()}
    with hpcaccum.jax.LocalSteps(inner, rule, start, PERIOD, **options) as opt:
        for call in range(CALLS):
            tree, receipt = opt.push(drawn(rank, call))
            assert receipt.sent == (call + 1 in pushes)
            close(tree.values(), found[call])
        saved = opt.snapshot() if rank == 0 else None
        meet()
    close(opt.params.values(), last)
    with hpcaccum.jax.LocalSteps(
        inner, rule, start, PERIOD, snapshot=saved, **options
    ) as opt:
        close(opt.params.values(), last)
        assert opt.global_step == len(pushes)


def test_jax_sends_no_other_arguments_in_fragments(comm):
    options = {"extra": {"value": 0.0}, "fragments": 2, "comm": comm}
    start = {"a": jnp.ones(2), "b": jnp.ones(2)}
    rules = optax.sgd(0.1), optax.sgd(1.0)
    error = raised(hpcaccum.jax.LocalSteps, *rules, start, 4, **options)
    check_error(error, "fragments= needs params without extra= arguments")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda params: outer(params[:1]), "all the parameters that it gets"),
        (lambda params: params, "must be one of torch.optim, got list"),
    ],
)
def test_an_outer_optimizer_is_checked_on_all_ranks(comm, rank, size, wrong, text):
    inner = torch.optim.SGD(groups(Model()), 0.1)
    mine = wrong if rank == size - 1 else outer
    error = raised(hpt.LocalSteps, inner, mine, comm=comm, module=None)
    assert text in str(error)


def test_an_outer_rule_is_checked_on_all_ranks(comm, rank, size):
    mine = None if rank == size - 1 else optax.sgd(1.0)
    with pytest.raises(TypeError, match="must be a GradientTransformation"):
        hpcaccum.jax.LocalSteps(optax.sgd(0.1), mine, jnp.ones(2), comm=comm)
