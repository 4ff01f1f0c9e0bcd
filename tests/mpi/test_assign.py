"""`assign`: values that a program sets become those of the center."""

import contextlib

import numpy as np
import pytest

import hpcaccum as hpc

from .acting import at, meet
from .on_device import FEW_RANKS
from .on_nodes import workers
from .training import ONE_SIDED, WRAPPERS, check_error, gives, raised, started, turns

pytestmark = pytest.mark.any_size

SHAPES = {"w": (37,), "m": (5, 3), "s": (), "empty": (0,)}


def made(sparse=False, wide=False):
    """Return variables, one of them sparse or of another dtype."""
    dtypes = [np.float64 if wide and name == "m" else "f4" for name in SHAPES]
    return [
        hpc.Variable(np.ones(shape, dtype), name, sparse=sparse and name == "m")
        for (name, shape), dtype in zip(SHAPES.items(), dtypes, strict=True)
    ]


def set_to(own, value):
    for number, var in enumerate(own):
        var.value[...] = value + number


def check(own, value, opt):
    """Check all values; no rank may change them before all have looked. Collective."""
    for number, (var, center) in enumerate(zip(own, opt.center(own), strict=True)):
        assert var.value.dtype == center.dtype
        assert (var.value == value + number).all(), (var.name, var.value)
        assert (center == value + number).all(), (var.name, center)
    meet()


def grads(own, value=1.0):
    return [
        hpc.IndexedSlices(np.full((1, *var.shape[1:]), value, var.dtype), [1])
        if var.sparse
        else np.full(var.shape, value, var.dtype)
        for var in own
    ]


def step(opt, own):
    return opt.minimize(gives(*grads(own)), var_list=own)


def steps(opt, own, kind, size, number=2):
    """Make updates until no gradient is under way."""
    for _ in range(number):
        if kind in ("CrossShard", "SyncReplicas"):
            step(opt, own)
        else:
            turns(range(size), lambda _: step(opt, own))
    meet()


SERVERS = {
    "one": lambda group: [0],
    "last": lambda group: [group.size - 1],
    "each node": lambda group: [ranks[-1] for ranks in group.nodes],
}


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("kind", "servers", "variables"),
    [
        ("SyncReplicas", "one", "sparse"),
        ("SyncReplicas", "each node", "dtypes"),
        ("DropStale", "last", "dtypes"),
        ("DropStale", "each node", "alike"),
        ("AGN", "one", "alike"),
        ("AGN", "last", "sparse"),
        ("AGN", "each node", "dtypes"),
    ],
)
def test_the_values_of_the_host_are_assigned(kind, servers, variables, group, size):
    own = made(variables == "sparse", variables == "dtypes")
    chosen = SERVERS[servers](group)
    host = chosen[0]
    with started(ONE_SIDED[kind](hpc.SGD(0.5), own, group, servers=chosen), own) as opt:
        for turn in range(3):
            steps(opt, own, kind, size, number=turn)
            before = opt.global_step, opt.statistics()
            set_to(own, 10.0 * turn + 0.25 * (group.rank != host))
            opt.assign()
            assert (opt.global_step, opt.statistics()) == before
            check(own, 10.0 * turn, opt)
        opt.assign()  # of values that nobody has changed
        check(own, 20.0, opt)
        set_to(own, 30.0)
        opt.assign()
        # The nodes of other ranks still have the values before.
    check(own, 30.0, opt)


def test_state_stays(comm, rank, size):
    """As if the center had been changed by hand between two updates."""
    for kind in WRAPPERS:
        own, expected = made(), made()
        inner, plain = hpc.Adam(0.1), hpc.Adam(0.1)
        with started(WRAPPERS[kind](inner, own, comm), own) as opt:
            each = 2 if kind == "AGN" else 1
            number = size if kind in ("DropStale", "AGN") else 1
            for value in (5.0, -3.0):
                steps(opt, own, kind, size, number=2 * each)
                set_to(own, value)
                opt.assign()
                for _ in range(2 * number):
                    plain.minimize(gives(*grads(expected)), var_list=expected)
                set_to(expected, value)
            steps(opt, own, kind, size, number=each)
            for _ in range(number):
                plain.minimize(gives(*grads(expected)), var_list=expected)
        for one, other in zip(own, expected, strict=True):
            np.testing.assert_allclose(one.value, other.value, 1e-5, err_msg=kind)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    ("kind", "servers"),
    [("SyncReplicas", "each node"), ("DropStale", "last"), ("AGN", "one")],
)
def test_dedicated_servers_take_the_values_of_the_first_rank_that_trains(
    kind, servers, group, rank, size
):
    chosen, own = SERVERS[servers](group), made()
    training = workers(group, chosen)
    options = {"comm": group, "servers": chosen, "dedicated": True}
    opt = (
        hpc.SyncReplicasOptimizer(hpc.Momentum(0.5, 0.5), len(training), **options)
        if kind == "SyncReplicas"
        else ONE_SIDED[kind](hpc.SGD(0.5), own, options.pop("comm"), **options)
    )
    opt.initialize(own)
    set_to(own, 7.0 + rank)
    opt.assign()  # before the servers serve
    assert (own[0].value == 7.0 + training[0]).all()
    if rank in chosen:
        opt.serve()
    else:
        for turn in range(3):
            assert step(opt, own)
            set_to(own, 10.0 * turn + rank)
            opt.assign()
            assert (own[0].value == 10.0 * turn + training[0]).all()
        assert step(opt, own)
    opt.free()
    mine = [var.value.tobytes() for var in own]
    assert meet(mine) == [mine] * size
    updates = {
        "SyncReplicas": 4,
        "DropStale": 4 * len(training),
        "AGN": 2 * len(training),
    }
    assert opt.global_step == updates[kind]
    if kind != "SyncReplicas":
        assert (own[0].value == 20.0 + training[0] - 0.5 * len(training)).all()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_dedicated_server_takes_part_in_free(kind, comm, rank):
    own = made()
    with started(ONE_SIDED[kind](hpc.SGD(0.5), own, comm, dedicated=True), own) as opt:
        if rank > 0:
            set_to(own, 4.0 + rank)
            opt.assign()
            assert (own[0].value == 5.0).all()
    check(own, 5.0, opt)


@FEW_RANKS
@pytest.mark.parametrize("kind", WRAPPERS)
def test_variables_on_a_device(kind, cp, comm, rank):
    own = [hpc.Variable(cp.asarray(var.value), var.name) for var in made()]
    with started(WRAPPERS[kind](hpc.SGD(0.5), own, comm), own) as opt:
        set_to(own, 4.0 + rank)
        opt.assign()
        check(own, 4.0, opt)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_ranks_that_have_left_take_part(kind, comm, rank, size):
    own = made()
    with started(WRAPPERS[kind](hpc.SGD(0.5), own, comm), own) as opt:
        if rank == 1:
            opt.leave()
        elif kind == "CrossShard":
            step(opt, own)
        set_to(own, 3.0 + rank)
        opt.assign()
        check(own, 3.0, opt)
        if rank == 1:
            assert "has left" in str(raised(step, opt, own))


@pytest.mark.ranks(min=2)
def test_a_gradient_that_waits_for_others_changes_the_new_values(comm, rank, size):
    own = made()
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 2 * size, comm=comm)
    with opt:
        opt.initialize(own)
        step(opt, own)  # accepted; each rank gives two of an update
        set_to(own, 5.0)
        opt.assign()
        check(own, 5.0, opt)
        step(opt, own)
        assert opt.global_step == 1
    check(own, 4.0, opt)
    assert opt.statistics().accepted == (2,) * size


@pytest.mark.parametrize("kind", ["SyncReplicas", "DropStale"])
def test_a_gradient_that_was_computed_before_is_of_the_step_of_the_values(kind, comm):
    own = made()
    opt = (
        hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 0, comm=comm)
        if kind == "DropStale"
        else hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1, comm=comm)
    )
    with opt:
        opt.initialize(own)
        pairs = opt.compute_gradients(gives(*grads(own)))
        # Another rank is ahead.
        at(comm.size - 1, lambda: [step(opt, own) for _ in range(2)])
        opt.assign()
        receipt = at(0, lambda: opt.apply_gradients(pairs))
        if comm.rank == 0:
            assert (receipt.accepted, receipt.lag) == (True, 0)
        meet()


def test_sums_of_agn_stay(comm, rank, size):
    own = made()
    with started(WRAPPERS["AGN"](hpc.SGD(1.0), own, comm), own) as opt:
        assert not step(opt, own).sent
        set_to(own, 9.0)
        opt.assign()
        check(own, 9.0, opt)
        assert all(each.sent for each in turns(range(size), lambda _: step(opt, own)))
    # The mean of two gradients of each rank.
    check(own, 9.0 - size, opt)


@pytest.mark.ranks(min=2)
def test_shard_groups_have_values_of_their_own(comm, rank, size):
    groups = [[*range(size // 2)], [*range(size // 2, size)]]
    if size == 3:
        groups = [[2, 0, 1]]
    own = made()
    opt = hpc.CrossShardOptimizer(hpc.SGD(1.0), group_assignment=groups, comm=comm)
    with opt:
        opt.initialize(own)
        set_to(own, float(rank))
        opt.assign()
        first = next(each for each in groups if rank in each)[0]
        check(own, float(first), opt)
        step(opt, own)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_errors(kind, comm, rank):
    own = made()
    opt = WRAPPERS[kind](hpc.SGD(1.0), own, comm)
    assert "call initialize" in str(raised(opt.assign))
    opt.initialize(own)
    if kind != "CrossShard":
        with opt.paused() if rank == 0 else contextlib.nullcontext():
            error = raised(opt.assign)
        check_error(error, "waits for updates, which are paused")
    opt.assign()
    opt.free()
    assert type(raised(opt.assign)) is hpc.FreedError
