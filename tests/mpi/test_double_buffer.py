"""Parameters and their DoubleBuffers: readers never see half an update."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import Group
from hpcaccum.deadline import Deadline
from hpcaccum.server import Parameters

from .support import WAIT
from .training import meet

SIZE = 7


@pytest.fixture(params=["first", "last"])
def host(request, size):
    if request.param == "last" and size == 1:
        pytest.skip("one rank is both first and last")
    return 0 if request.param == "first" else size - 1


@pytest.fixture
def one_node(comm):
    if not Group.of(comm).single_node:
        pytest.skip("readers on other nodes have a copy of their own")


@pytest.fixture
def make(comm, host, rank):
    """Return a function that makes buffers; all are freed at the end."""
    made = []

    def make(size=SIZE, dtype=np.float64):
        made.append(Parameters(Group.of(comm), host, size, dtype, "test"))
        if rank == host:
            made[-1].publish(fill(0), 0)
        meet()
        return made[-1]

    yield make
    meet()
    for parameters in made:
        parameters.free()


def fill(version):
    return lambda flat: flat.fill(version)


def read(parameters, out=None, use=None):
    out, deadline = np.full(SIZE, -1.0) if out is None else out, Deadline(WAIT, "t")
    parameters.wait(parameters.newest(), deadline, str)
    version = parameters.read(use or (lambda f: np.copyto(out, f)), deadline)
    return version, out


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_every_rank_reads_what_was_published_last(make, host, rank, dtype):
    parameters = make(dtype=dtype)
    for version in range(4):
        if rank == host and version:
            parameters.publish(fill(version), version)
        meet()
        found, out = read(parameters, np.zeros(SIZE, dtype))

        assert found == parameters.newest() == version
        assert (out == version).all()
        meet()


def test_nothing_at_all_can_be_published(make, host, rank):
    parameters = make(size=0)
    if rank == host:
        parameters.publish(fill(1), 1)
    meet()

    assert read(parameters, np.zeros(0))[0] == 1


def overtaken(parameters, host, rank, size, publish):
    """Return what the rank after the root reads while the root publishes.

    Returns:
        The version, the vector, and the number of copies; None on other ranks. With
        one rank, the root reads.
    """
    calls, out = [], np.zeros(SIZE)

    def middle():
        meet()
        if rank == host:
            publish()
        meet()

    def use(flat):
        out[:3] = flat[:3]
        if not calls:
            middle()
        calls.append(1)
        out[3:] = flat[3:]

    if rank == (host + 1) % size:
        version, _ = read(parameters, out, use)
        return version, out, len(calls)
    middle()
    return None


def test_a_copy_that_two_updates_overtook_is_made_again(
    one_node, make, host, rank, size
):
    parameters = make()

    def publish():
        parameters.publish(fill(1), 1)
        parameters.publish(fill(2), 2)

    found = overtaken(parameters, host, rank, size, publish)

    if found:
        version, out, calls = found
        assert (version, calls) == (2, 2)
        assert (out == 2).all()


def test_a_copy_that_one_update_overtook_is_good(one_node, make, host, rank, size):
    parameters = make()

    def publish():
        parameters.publish(fill(1), 1)

    found = overtaken(parameters, host, rank, size, publish)

    if found:
        version, out, calls = found
        assert (version, calls) == (0, 1)
        assert (out == 0).all()


def test_an_update_that_is_being_written_is_not_read(one_node, make, host, rank):
    parameters = make()
    seen = []

    def unfinished(flat):
        flat[:4] = 2
        seen.append(parameters.newest())
        seen.append(read(parameters)[0])
        flat[4:] = 2

    if rank == host:
        parameters.publish(fill(1), 1)
        parameters.publish(unfinished, 2)
        assert seen == [1, 1]
    meet()
    assert read(parameters)[0] == 2


@pytest.mark.ranks(min=2)
def test_a_copy_that_is_being_written_over_is_made_again(
    one_node, make, host, rank, size
):
    parameters = make()

    def publish():
        def unfinished(flat):
            flat.fill(2)
            meet()  # the reader goes on
            meet()  # the reader has read

        parameters.publish(fill(1), 1)
        parameters.publish(unfinished, 2)

    found = overtaken(parameters, host, rank, size, publish)
    if rank != host:
        meet()  # the reader has read
        meet()  # the root has published

    if found:
        version, out, calls = found
        assert (version, calls) == (1, 2)
        assert (out == 1).all()


@pytest.mark.parametrize(("length", "last"), [(20_000, 250), (2_000_000, 20)])
def test_readers_under_fire_never_see_half_an_update(
    make, host, rank, size, length, last
):
    parameters = make(length, np.float32)
    out, before, seen = np.zeros(length, np.float32), 0, set()
    if rank == host and size > 1:
        for version in range(1, last + 1):
            parameters.publish(fill(version), version)
    while before < last and rank != host:
        version, _ = read(parameters, out)
        assert before <= version
        assert (out == version).all(), (version, np.unique(out))
        before = version
        seen.add(version)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=str)
def test_half_precision_is_rounded_once_when_read(make, host, rank, dtype):
    parameters = make(dtype=np.float32)
    third = np.float32(1) / 3
    if rank == host:
        parameters.publish(fill(third), 1)
    meet()
    out = np.zeros(SIZE, dtype)
    read(parameters, out, lambda flat: np.copyto(out, flat, casting="same_kind"))

    assert (out == third.astype(dtype)).all()
