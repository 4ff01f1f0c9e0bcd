"""Gradients of PyTorch and JAX that travel in half precision, between nodes only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import hpcaccum as hpc
import hpcaccum.jax
import hpcaccum.torch as hpt

from ..common import same_bits
from ..mpi.on_nodes import group_on_nodes  # noqa: F401
from ..mpi.reducing import model
from ..mpi.training import check_error, raised
from .torch_training import Model, sgd

# A float32 that half precision cannot hold; sums of them are exact in float32.
FINE = 1 + 2**-12


def expected(group, wire):
    parts = [np.full(1, FINE, np.float32)] * group.size
    return model(parts, group.nodes, np.float32, wire=wire)


def stepped(comm, wire, leaves=False):
    """Return the different values of a model after a step."""
    module = Model()
    with hpt.CrossShard(sgd(module), comm=comm, wire_dtype=wire) as opt:
        if leaves:
            opt.leave()
        else:
            (FINE * (module.w.sum() + module.b.sum())).backward()
            opt.step()
    return np.unique(torch.cat([module.w.flatten(), module.b]).detach().numpy())


@pytest.mark.parametrize("wire", [torch.bfloat16, "float16"])
def test_torch(wire, group):
    values = stepped(group, wire)

    same_bits(values, -expected(group, str(wire).removeprefix("torch.")))
    assert FINE not in -values


@pytest.mark.ranks(min=3)
def test_torch_after_a_rank_has_left(comm, rank):
    if hpc.group_of(comm).single_node:
        pytest.skip("needs ranks on several nodes: MPIR_CVAR_NOLOCAL=1")
    # FINE is rounded.
    assert stepped(comm, "float16", leaves=rank == 0).tolist() == [-1]


def test_jax(group, keep):
    average = keep(hpcaccum.jax.average(group, wire_dtype=jnp.bfloat16))

    (mean,) = jax.jit(average.update)([jnp.full(3, FINE)], optax.EmptyState())[0]

    same_bits(np.unique(mean), expected(group, "bfloat16"))


def test_on_one_node_nothing_is_rounded(comm):
    if not hpc.group_of(comm).single_node:
        pytest.skip("needs ranks that share memory")
    assert stepped(comm, "bfloat16").tolist() == [-FINE]
    average = hpcaccum.jax.average(comm, wire_dtype="bfloat16")
    (mean,) = average.update([jnp.full(3, FINE)], optax.EmptyState())[0]
    average.free()
    assert (mean == FINE).all()


WRONG = {
    "wider": ("float64", hpc.InvalidArgumentError, "must be narrower than float32"),
    "equal": (torch.float32, hpc.InvalidArgumentError, "must be narrower than float32"),
    "integers": (torch.int8, hpc.InvalidArgumentError, "dtype must be one of"),
    "text": ("half-ish", TypeError, "must name a float type, got 'half-ish'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_dtype_is_refused_before_anything_changes(case, comm, rank):
    wire, error, text = WRONG[case]
    module = Model(start=rank)
    found = raised(hpt.CrossShard, sgd(module), comm=comm, wire_dtype=wire)
    check_error(found, text, kind=error)
    assert module.w.eq(rank).all()
    if isinstance(wire, str):

        def update():
            average = hpcaccum.jax.average(comm, wire_dtype=wire)
            average.update([jnp.ones(2)], optax.EmptyState())

        assert isinstance(raised(update), error)
