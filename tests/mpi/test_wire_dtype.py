"""Gradients and parameters of servers that travel in half precision, between nodes."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from tests import internals

from .. import naive
from ..common import check_error, same_bits
from . import reducing
from .support import meet
from .training import ONE_SIDED, diloco, gives, raised, turns, variable

SHAPES = {"matrix": (70, 50), "scalar": (), "vector": (3001,)}
WIRES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EACH = pytest.mark.parametrize("wire", WIRES)
# A float32 that half precision cannot hold.
FINE = np.float32(1 + 2**-12)


drawn = functools.partial(reducing.drawn, SHAPES, dtype=np.float32)


def made():
    return [variable(each, np.float32, name) for name, each in drawn(9).items()]


def here(group):
    """Whether this rank is on the node of rank 0, the server."""
    return group.rank in group.nodes[0]


def check(variables, center, group, wire):
    """Compare the variables of this rank with what it was sent."""
    expected = center if here(group) else naive.rounded(center, wire)
    for var in variables:
        same_bits(var.value, expected[var.name])


@EACH
def test_each_way_rounds_once(group, rank, size, wire):
    variables, server = made(), naive.Server(drawn(9), naive.Momentum(0.5))
    options = {"comm": group, "servers": 0, "wire_dtype": wire}
    with hpc.SyncReplicasOptimizer(hpc.SGD(0.5), size, **options) as opt:
        opt.initialize(variables)
        check(variables, server.values, group, WIRES[wire])
        for call in range(3):
            opt.minimize(gives(*drawn(rank, call).values()))
            grads = [drawn(r, call) for r in range(size)]
            server.update(naive.mean_between(grads, group.nodes, WIRES[wire]))
            check(variables, server.values, group, WIRES[wire])
        meet()
        if rank == 0:
            for name, array in opt.snapshot()["variables"].items():
                same_bits(array, server.values[name])


@EACH
def test_single_gradients_are_rounded(group, rank, size, wire):
    variables, server = made(), naive.DropStale(drawn(9), naive.Momentum(0.5), np.inf)
    options = {"comm": group, "servers": 0, "wire_dtype": wire}
    with hpc.DropStaleGradientOptimizer(hpc.SGD(0.5), 99, **options) as opt:
        opt.initialize(variables)
        turns(
            range(size), lambda turn: bool(opt.minimize(gives(*drawn(turn).values())))
        )
        for r in range(size):
            grad = drawn(r)
            if r not in group.nodes[0]:
                grad = naive.rounded(grad, WIRES[wire])
            server.push(grad, server.step)
        if rank == size - 1:
            check(variables, server.values, group, WIRES[wire])
    check(variables, server.values, group, WIRES[wire])


@EACH
def test_several_servers_keep_what_they_do_not_send(group, rank, size, wire):
    """Gradients are whole numbers, so only the way of parameters rounds."""
    variables = [variable(np.full(s, FINE), np.float32, n) for n, s in SHAPES.items()]
    servers = [ranks[0] for ranks in group.nodes]
    options = {"comm": group, "servers": servers, "wire_dtype": wire}
    with hpc.SyncReplicasOptimizer(hpc.Momentum(0.5, 0.5), size, **options) as opt:
        opt.initialize(variables)
        for _ in range(2):
            opt.minimize(gives(*[np.full(s, 4, np.float32) for s in SHAPES.values()]))
        for var in variables:
            assert np.unique(var.value) == np.float32(WIRES[wire](FINE - 5))
        meet()
        for freed in (False, True):
            if rank == 0:
                saved = opt.snapshot()
                for name, array in saved["variables"].items():
                    same_bits(array, np.full(SHAPES[name], np.float32(FINE - 5)))
                assert set(saved["state"]["vector"]) == {"momentum", "step"}
            if not freed:
                opt.free()
    saved = meet(saved if rank == 0 else None)[0]
    with hpc.SyncReplicasOptimizer(hpc.Momentum(0.5, 0.5), size, **options) as opt:
        opt.restore(saved if rank == 0 else None, variables)
        if rank == 0:
            for name, array in opt.snapshot()["variables"].items():
                same_bits(array, saved["variables"][name])


def test_weights_and_missing_gradients_are_not_rounded(group, rank, size):
    """In float16, a weight of 100,003 is infinite; in bfloat16, it is 100,352."""
    v, w = variable(np.zeros(3000), np.float32, "v"), variable(0, np.float32)
    for wire in WIRES:
        options = {"comm": group, "servers": 0, "wire_dtype": wire}
        with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, **options) as opt:
            grads = np.full(3000, 2.0**-10, np.float32), np.float32(2**-10)
            pairs = list(zip(grads, [v, w], strict=True))
            if rank == size - 1:
                pairs[1] = None, w
            opt.initialize([v, w])
            opt.apply_gradients(pairs, weight=100_003.0)
            for var in (v, w):
                error = 2.0**-8 if wire == "bfloat16" else 2.0**-11
                np.testing.assert_allclose(var.value, -(2.0**-10), rtol=2 * error)
            meet()
        v.value[...] = w.value[...] = 0


# A vector of gradients is longer than that of the parameters.
@pytest.mark.parametrize("count", [7, 2047])
def test_short_vectors_are_sent_as_they_are(group, rank, size, count):
    x = variable(np.ones(count), np.float32)
    with internals.limits(short=1 << 13):
        options = {"comm": group, "wire_dtype": "bfloat16"}
        with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, **options) as opt:
            opt.minimize(gives(np.full(count, FINE)), var_list=[x])
            assert np.unique(x.value) == 1 - FINE


@pytest.mark.any_size
def test_inside_a_node_nothing_is_rounded(one_node, rank, size):
    x = variable(np.ones(3000), np.float32)
    with hpc.SyncReplicasOptimizer(
        hpc.SGD(1), size, comm=one_node, wire_dtype="float16"
    ) as opt:
        opt.minimize(gives(np.full(3000, FINE)), var_list=[x])
        assert np.unique(x.value) == 1 - FINE


def test_rows_and_parameters_beside_them_are_not_rounded(group, rank, size):
    table = hpc.Variable(np.full((900, 4), FINE), "table", sparse=True)
    x = variable(np.full(3000, FINE), np.float32)
    grad = hpc.IndexedSlices(np.full((1, 4), FINE), [rank])
    options = {"comm": group, "wire_dtype": "bfloat16"}
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), size, **options) as opt:
        opt.minimize(gives(grad, np.zeros(3000, np.float32)), var_list=[table, x])
        assert np.unique(x.value) == FINE
        expected = np.full((size, 4), FINE - FINE / size)
        np.testing.assert_allclose(table.value[:size], expected, rtol=1e-6)


@pytest.mark.any_size
@pytest.mark.parametrize("make", [*ONE_SIDED.values(), diloco])
def test_it_is_narrower_than_what_is_sent(comm, make):
    w = variable(0, np.float32)
    with make(hpc.SGD(1), [w], comm, wire_dtype="float32") as opt:
        assert "wire_dtype='float32'" in repr(opt)
        error = raised(opt.initialize, [w])
    check_error(error, "wire_dtype must be narrower than float32")
