"""What ``on_loss="shrink"`` does not allow."""

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, Layout, Reducer
from hpcaccum.mpi import group_of
from hpcaccum.mpi.job import process

from .acting import everywhere
from .reducing import made_up
from .training import raised

pytestmark = [pytest.mark.any_size, pytest.mark.ranks(min=2)]


@pytest.fixture
def one_node(comm):
    if not group_of(comm).single_node:
        pytest.skip("the ranks do not share memory")
    return comm


def optimizer(comm, **options):
    return hpc.CrossShardOptimizer(hpc.SGD(1.0), comm=comm, on_loss="shrink", **options)


def reducer(comm, **options):
    layout = Layout({"a": (3,)}, np.float32)
    return Reducer(layout, comm, on_loss="shrink", **options)


@pytest.mark.parametrize("make", [optimizer, reducer])
@pytest.mark.parametrize("schedule", ["flat", "hierarchical", "nccl"])
def test_other_schedules_are_refused(comm, make, schedule):
    error = raised(make, comm, schedule=schedule)

    assert isinstance(error, InvalidArgumentError)
    assert f"is for schedule 'auto' or 'shared', not '{schedule}'" in str(error)


@pytest.mark.parametrize("make", [optimizer, reducer])
def test_several_nodes_are_refused(comm, make):
    group = group_of(comm)
    if group.single_node:
        group = made_up(comm, "halves")
    error = raised(make, group)

    assert isinstance(error, InvalidArgumentError)
    assert "needs all ranks on one node, they are on " in str(error)


def test_ranks_that_do_not_see_each_other_are_refused(one_node, rank, monkeypatch):
    # A process of another container.
    own = process.Process.own()._replace(started="?" if rank == 0 else "")
    monkeypatch.setattr(process.Process, "own", lambda: own)
    other = one_node.Dup()
    error = raised(optimizer, other)
    other.Free()

    assert "needs ranks that see each other's processes" in str(error)


@pytest.mark.parametrize("kind", ["sparse", "device"])
def test_variables_that_are_sparse_or_on_a_device_are_refused(one_node, request, kind):
    w = hpc.Variable(np.zeros((4, 2)), "w", sparse=kind == "sparse")
    if kind == "device":
        w = hpc.Variable(request.getfixturevalue("cp").zeros(3, np.float32), "w")
    opt = optimizer(one_node)
    error = raised(opt.initialize, [w])

    assert isinstance(error, InvalidArgumentError)
    assert "'shrink' is not for variables that are on a device, or sparse" in str(error)
    everywhere(opt.free)
