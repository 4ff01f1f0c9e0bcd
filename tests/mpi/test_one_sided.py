"""The common behavior of the one-sided optimizers."""

import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError, group_of
from hpcaccum.mpi.job.runtime import MPI
from tests import internals

from ..common import WAIT, check_error
from .support import meet
from .training import ONE_SIDED, Gate, computed, gives, raised, started, turns, variable


@pytest.fixture(params=ONE_SIDED)
def kind(request):
    return request.param


@pytest.fixture
def make(make_one, kind):
    return lambda own, inner=None, **options: make_one(
        ONE_SIDED[kind], inner or hpc.SGD(1), own, variables=own, **options
    )


def updates(kind, workers, calls):
    """Return the number of updates that ``calls`` calls of each worker make."""
    return {"SyncReplicas": 1, "DropStale": workers, "AGN": workers / 2}[kind] * calls


@pytest.mark.parametrize(
    ("where", "dedicated"),
    [("last", False), ("first", True), ("last", True)],
    ids=["beside", "dedicated-first", "dedicated-last"],
)
def test_any_host_beside_its_training_or_alone(
    make, kind, rank, size, where, dedicated
):
    if dedicated and size == 1:
        pytest.skip("a dedicated host needs 2 ranks")
    host, workers = 0 if where == "first" else size - 1, size - dedicated
    w = variable(np.full((2, 3), float(rank)))
    opt = make([w], host=host, dedicated=dedicated)
    start, serves = w.value.copy(), dedicated and rank == host
    if serves:
        opt.serve()
    else:
        for _ in range(10):
            opt.minimize(gives(np.ones((2, 3))))
        opt.leave()
    served = w.value.copy()
    meet()
    center, step, tally = opt.center(w), opt.global_step, opt.statistics()

    expected = updates(kind, workers, 10)
    pushes = 5 if kind == "AGN" else 10
    mine = [pushes] * size
    mine[host] *= not dedicated
    assert (start == host).all()
    assert step == expected
    assert (center == host - expected).all()
    assert not serves or (served == center).all()
    assert tally.accepted == tuple(mine)
    assert tally.dropped == (0,) * size
    assert sum(tally.lags.values()) == pushes * workers
    assert opt.waited >= 0


@pytest.mark.ranks(min=2)
def test_a_dedicated_host_only_serves(make, rank):
    w = variable()
    opt = make([w], dedicated=True)
    if rank == 0:
        errors = [
            raised(opt.minimize, gives(1.0)),
            raised(opt.apply_gradients, [(1.0, w)]),
            raised(opt.compute_gradients, gives(1.0)),
            raised(opt.gradient_arrays),
        ]
        opt.leave()
        opt.serve()
        assert {type(error) for error in errors} == {InvalidArgumentError}
        assert {"serve()" in str(error) for error in errors} == {True}
    else:
        error = raised(opt.serve)
        opt.leave()
        check_error(error, f"rank {rank} is not a server (rank 0 is); it must train")
    assert w.value == 0


def test_a_host_that_trains_is_not_told_to_serve(make):
    opt = make([variable()])
    check_error(
        raised(opt.serve), "dedicated=True was not given: rank 0 serves while it tr"
    )


@pytest.mark.ranks(min=2)
def test_a_server_that_idles_has_no_limit(make, kind, rank, size, monkeypatch):
    opt = make([variable()], dedicated=True)
    if rank == 0:
        monkeypatch.setenv("HPCACCUM_TIMEOUT", "0.05")
        opt.serve()
        monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))
    else:
        time.sleep(0.2)
        for _ in range(2):
            opt.minimize(gives(1.0))
        opt.leave()
    meet()
    assert opt.global_step == updates(kind, size - 1, 2)


def test_without_threads_the_host_must_be_dedicated(comm, size, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    one_node, w = group_of(comm).single_node, variable()
    with ONE_SIDED["DropStale"](hpc.SGD(1), [w], comm) as opt:
        error = raised(opt.initialize, [w])
    if size > 1 and one_node:
        with ONE_SIDED["DropStale"](hpc.SGD(1), [w], comm, dedicated=True) as opt:
            opt.initialize([w])

    check_error(error, "MPI_THREAD_MULTIPLE")
    assert ("dedicated=True" in str(error)) == one_node


@pytest.mark.parametrize("kind", ["DropStale"])
def test_memory_is_that_of_gradients_and_parameters(make, comm, size):
    with internals.note_memory(sizes := []):
        make([variable(np.zeros(1000))], Gate(lambda: None))
    held = sum(meet(sum(sizes)))

    # On each node two copies of the center; a gradient of each rank; on the host's node
    # a gradient of other nodes.
    nodes = len(group_of(comm).nodes)
    least = 8000 * (2 * nodes + size + (nodes > 1))
    assert least <= held < least + 1024 * (1 + size)


@pytest.mark.ranks(1)
def test_one_rank_cannot_be_dedicated(make):
    with pytest.raises(InvalidArgumentError, match="needs at least 2 ranks"):
        make([variable()], dedicated=True)


def test_several_at_once_do_not_disturb_each_other(comm, size):
    trained = []
    for number, (kind, build) in enumerate([*ONE_SIDED.items()] * 2):
        w = variable(name=f"w{number}")
        opt = started(build(hpc.SGD(1), [w], comm, host=number % size), [w])
        trained.append((kind, opt, w, number + 1.0))
    for _ in range(6):
        for _, opt, _, grad in trained:
            opt.minimize(gives(grad))
    meet()
    for kind, opt, w, grad in trained:
        assert opt.center(w) == -grad * updates(kind, size, 6)
    for _, opt, *_ in reversed(trained):
        opt.free()


# The smallest quorum and staleness: a rank whose parameters are old is dropped.
STRICT = {
    "SyncReplicas": lambda rule, comm: hpc.SyncReplicasOptimizer(rule, 1, comm=comm),
    "DropStale": lambda rule, comm: hpc.DropStaleGradientOptimizer(rule, 0, comm=comm),
}


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.ranks(min=2)
def test_after_a_drop_no_rank_computes_what_must_be_dropped(comm, strict, rank, size):
    def slowly():
        time.sleep(0.1)
        return 1.0

    w = variable()
    opt = started(STRICT[strict](hpc.SGD(slowly), comm), [w])
    pairs = computed(opt, 1.0)
    seen = []
    if rank == 0:
        opt.apply_gradients(pairs)
    elif rank == size - 1:
        while not internals.admitted_step(opt):
            time.sleep(0)
        # Rank 0's gradient is admitted but not applied: this rank's parameters are
        # stale, and no newer ones exist.
        seen = [bool(opt.apply_gradients(pairs)), opt.global_step]
        opt.compute_gradients(gives(1.0))
        seen += [float(w.value), opt.global_step]
    opt.free()

    if rank == size - 1:
        assert seen == [False, 0, -1, 1]


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.ranks(min=2)
def test_after_a_drop_parameters_are_pulled_at_once(comm, strict, rank, size):
    w, step = variable(), hpc.Variable(0, "step")
    with started(STRICT[strict](hpc.SGD(1), comm), [w]) as opt:
        pairs = computed(opt, 8.0)
        meet()  # no update before all have computed
        turns([0, 0], lambda _: opt.minimize(gives(1.0)))

        def late(_):
            receipt = opt.apply_gradients(pairs, step)
            return receipt, float(w.value), int(step.value)

        [found] = turns([size - 1], late)
        [again] = turns([size - 1], lambda _: opt.minimize(gives(1.0)))
        assert opt.center(w) == -3
        assert opt.statistics().dropped == (0,) * (size - 1) + (1,)
        assert opt.statistics().lags == {0: 3, 2: 1}

    assert found == (hpc.Receipt(False, 0, 2), -2, 2)
    assert again == hpc.Receipt(True, 2, 2)


@pytest.mark.ranks(min=2)
def test_different_variables_are_refused_by_all(kind, comm, rank, size):
    odd = rank == size - 1
    for mine in (
        variable(np.zeros(3 if odd else 2)),
        variable(np.zeros(2), name="v" if odd else "w"),
        variable(np.zeros(2), np.float32 if odd else np.float64),
    ):
        with ONE_SIDED[kind](hpc.SGD(1), [mine], comm) as opt:
            error = raised(opt.initialize, [mine])
        check_error(error, f"rank {size - 1}", kind=DisagreementError)
    with ONE_SIDED[kind](hpc.SGD(1), [mine], comm) as opt:
        error = raised(opt.initialize, [mine, mine])
    assert "names must be unique" in str(error)


@pytest.mark.parametrize("dedicated", [False, True])
def test_defaults_depend_on_the_ranks_that_train(comm, size, dedicated):
    if dedicated and size == 1:
        pytest.skip("one rank cannot be dedicated")
    workers = size - dedicated
    quorum = {1: 1, 2: 2}.get(workers, workers - 1)
    options = {"comm": comm, "dedicated": dedicated}
    sync = hpc.SyncReplicasOptimizer(hpc.SGD(1), **options)
    stale = hpc.DropStaleGradientOptimizer(hpc.SGD(1), **options)

    assert f", replicas_to_aggregate={quorum}, servers=" in repr(sync)
    assert f", staleness={2 * workers}, servers=" in repr(stale)
    sync.free()
    stale.free()


# Gradients in the memory from which a server takes them


@pytest.fixture
def copied():
    """The shapes of the gradients that pushes of this rank copy."""
    shapes = []
    with internals.note_copies(shapes):
        yield shapes


@pytest.fixture(params=["SyncReplicas", "DropStale"])
def make_zeros(request, make_one, size):
    """Return a function that makes an optimizer of zeros; and updates of a call."""

    def make(**shapes):
        own = [variable(np.zeros(shape), name=name) for name, shape in shapes.items()]
        opt = make_one(ONE_SIDED[request.param], hpc.SGD(1), own, variables=own)
        return opt, own, 1 if request.param == "SyncReplicas" else size

    return make


def centers(opt, own):
    meet()
    found = [array.tolist() for array in opt.center(own)]
    meet()
    return found


def test_what_lies_in_its_place_is_not_copied(make_zeros, rank, size, copied):
    opt, own, updates = make_zeros(w=(3,), v=())
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


def test_what_lies_elsewhere_is_copied_once(make_zeros, copied):
    # In the place of another gradient, or reversed in its own.
    opt, own, updates = make_zeros(w=(3,), v=(3,), u=(3,))
    arrays = opt.gradient_arrays()
    arrays["w"][:], arrays["v"][:], arrays["u"][:] = [1, 2, 3], [4, 5, 6], [7, 8, 9]
    opt.minimize(gives(arrays["v"], arrays["w"], arrays["u"][::-1]))

    expected = np.multiply(-updates, [[4, 5, 6], [1, 2, 3], [9, 8, 7]])
    np.testing.assert_allclose(centers(opt, own), expected, 1e-14)
    assert copied == [(3,)] * 3


def test_arrays_that_were_pushed_are_read_only(make_zeros):
    opt, own, updates = make_zeros(w=(3,))
    arrays = opt.gradient_arrays()
    arrays["w"][:] = 1
    opt.minimize(lambda: (0.0, arrays))
    with pytest.raises(ValueError, match="read-only"):
        arrays["w"][:] = 2
    opt.gradient_arrays()["w"][:] = 3

    assert centers(opt, own) == [[-updates] * 3]


def test_what_is_left_in_the_place_of_a_missing_one_does_not_count(make_zeros, rank):
    opt, own, updates = make_zeros(w=(), v=())
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
            internals.push(opt, arrays, 0)
        # The first round is being reduced, or was: this must not change its mean.
        later = opt.gradient_arrays()
        later["w"][:] = 100
        internals.wait_for(opt, 1)
        assert centers(opt, [w]) == [[-2] * 3]
        internals.push(opt, later, 1)
        internals.push(opt, {"w": np.zeros(3)}, 1)
        internals.wait_for(opt, 2)
        assert centers(opt, [w]) == [[-52] * 3]
    assert copied == [(3,)]
