"""Gradients that are computed in the memory from which a server takes them."""

from __future__ import annotations

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import testing

from .training import ONE_SIDED, gives, meet, variable

pytestmark = pytest.mark.any_size


@pytest.fixture
def copied():
    """The shapes of the gradients that pushes of this rank copy."""
    shapes = []
    with testing.note_copies(shapes):
        yield shapes


@pytest.fixture(params=["SyncReplicas", "DropStale"])
def make(request, comm, size):
    """Return a function that makes an optimizer of zeros; and updates of a call."""
    made = []

    def make(**shapes):
        own = [variable(np.zeros(shape), name=name) for name, shape in shapes.items()]
        made.append(ONE_SIDED[request.param](hpc.SGD(1), own, comm))
        made[-1].initialize(own)
        return made[-1], own, 1 if request.param == "SyncReplicas" else size

    yield make
    for opt in made:
        opt.free()


def centers(opt, own):
    meet()
    found = [array.tolist() for array in opt.center(own)]
    meet()
    return found


def test_what_lies_in_its_place_is_not_copied(make, rank, size, copied):
    opt, own, updates = make(w=(3,), v=())
    for step in range(5):
        arrays, again = opt.gradient_arrays(), opt.gradient_arrays()
        assert all(np.shares_memory(again[name], arrays[name]) for name in arrays)
        arrays["w"][:] = [1, step, rank]
        arrays["v"][...] = step
        opt.minimize(lambda arrays=again if step % 2 else arrays: (0.0, arrays))
    w, v = centers(opt, own)

    mean = (size - 1) / 2
    np.testing.assert_allclose(w, np.multiply(-5 * updates, [1, 2, mean]))
    np.testing.assert_allclose(v, -10 * updates)
    assert copied == []


def test_what_lies_elsewhere_is_copied_once(make, copied):
    # In the place of another gradient, or reversed in its own.
    opt, own, updates = make(w=(3,), v=(3,), u=(3,))
    arrays = opt.gradient_arrays()
    arrays["w"][:], arrays["v"][:], arrays["u"][:] = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    opt.minimize(gives(arrays["v"], arrays["w"], arrays["u"][::-1]))

    expected = np.multiply(-updates, [[4, 5, 6], [1, 2, 3], [9, 8, 7]])
    np.testing.assert_allclose(centers(opt, own), expected, 1e-14)
    assert copied == [(3,)] * 3


def test_arrays_that_were_pushed_are_read_only(make):
    opt, own, updates = make(w=(3,))
    arrays = opt.gradient_arrays()
    arrays["w"][:] = 1
    opt.minimize(lambda: (0.0, arrays))
    with pytest.raises(ValueError, match="read-only"):
        arrays["w"][:] = 2
    opt.gradient_arrays()["w"][:] = 3

    assert centers(opt, own) == [[-updates] * 3]


def test_what_is_left_in_the_place_of_a_missing_one_does_not_count(make, rank, size):
    opt, own, updates = make(w=(), v=())
    for value in opt.gradient_arrays().values():
        value[...] = 7
    opt.minimize(gives(opt.gradient_arrays()["w"], 7.0 if rank == 0 else None))

    np.testing.assert_allclose(centers(opt, own), [-7 * updates, -7], rtol=1e-14)


def test_a_place_is_kept_until_its_push_and_no_longer(comm, size, copied):
    w = variable(np.zeros(3))
    with hpc.SyncReplicasOptimizer(hpc.SGD(1), 2 * size, comm=comm) as opt:
        opt.initialize([w])
        for value in (1, 3):
            arrays = opt.gradient_arrays()
            arrays["w"][:] = value
            testing.push(opt, arrays, 0)
        # The first round is being reduced, or was: this must not change its mean.
        later = opt.gradient_arrays()
        later["w"][:] = 100
        testing.wait_for(opt, 1)
        assert centers(opt, [w]) == [[-2] * 3]
        testing.push(opt, later, 1)
        testing.push(opt, {"w": np.zeros(3)}, 1)
        testing.wait_for(opt, 2)
        assert centers(opt, [w]) == [[-52] * 3]
    assert copied == [(3,)]
