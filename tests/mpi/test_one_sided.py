"""The common behavior of the one-sided optimizers."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import DisagreementError, InvalidArgumentError, group_of, testing
from hpcaccum.mpi.job.runtime import MPI

from .support import WAIT
from .training import ONE_SIDED, computed, gives, meet, raised, turns, variable

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(params=ONE_SIDED)
def kind(request):
    return request.param


@pytest.fixture
def make(comm, kind):
    """Return a function that makes an optimizer; all are freed after the test."""
    made = []

    def make(variables, inner=None, **options):
        inner = hpc.SGD(1) if inner is None else inner
        made.append(ONE_SIDED[kind](inner, variables, comm, **options))
        made[-1].initialize(variables)
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.free()


def updates(kind, workers, calls):
    """Return the number of updates that ``calls`` calls of each worker make."""
    return {"SyncReplicas": 1, "DropStale": workers, "AGN": workers / 2}[kind] * calls


# The host rank


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
    start = w.value.copy()
    if dedicated and rank == host:
        opt.serve()
    else:
        for _ in range(10):
            opt.minimize(gives(np.ones((2, 3))))
        opt.leave()
    meet()
    center, step, tally = opt.center(w), opt.global_step, opt.statistics()

    expected = updates(kind, workers, 10)
    pushes = 5 if kind == "AGN" else 10
    mine = [pushes] * size
    mine[host] *= not dedicated
    assert (start == host).all()
    assert step == expected
    assert (center == host - expected).all()
    assert tally.accepted == tuple(mine)
    assert tally.dropped == (0,) * size
    assert sum(tally.lags.values()) == pushes * workers
    assert opt.waited >= 0


@pytest.mark.ranks(min=2)
def test_a_host_that_does_not_call_serve_serves_at_the_end(make, kind, rank, size):
    w = variable([0.0])
    opt = make([w], dedicated=True)
    if rank:
        for _ in range(4):
            opt.minimize(gives([1.0]))
    opt.free()

    assert opt.global_step == updates(kind, size - 1, 4)
    assert w.value == -opt.global_step


def test_gradients_have_no_place_before_the_start(kind, comm):
    w = variable()
    with ONE_SIDED[kind](hpc.SGD(1), [w], comm) as opt:
        assert type(raised(opt.gradient_arrays)) is InvalidArgumentError


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
        assert type(error) is InvalidArgumentError
        assert f"rank {rank} is not a server (rank 0 is); it must train" in str(error)
    assert w.value == 0


def test_a_host_that_trains_is_not_told_to_serve(make):
    opt = make([variable()])
    error = raised(opt.serve)

    assert type(error) is InvalidArgumentError
    assert "dedicated=True was not given: rank 0 serves while it tr" in str(error)


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

    assert type(error) is InvalidArgumentError
    assert "MPI_THREAD_MULTIPLE" in str(error)
    assert ("dedicated=True" in str(error)) == one_node


@pytest.mark.parametrize("kind", ["DropStale"])
def test_memory_is_that_of_gradients_and_parameters(make, comm, size):
    with testing.note_memory(sizes := []):
        make([variable(np.zeros(1000))], Own("own"))
    held = sum(meet(sum(sizes)))

    # On each node two copies of the center; a gradient of each rank; on the host's node
    # a gradient of other nodes.
    nodes = len(group_of(comm).nodes)
    least = 8000 * (2 * nodes + size + (nodes > 1))
    assert least <= held < least + 1024 * (1 + size)


class Own(hpc.Optimizer):
    """An optimizer of the user, whose center is in memory of its own."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        """It makes no update."""


@pytest.mark.ranks(1)
def test_one_rank_cannot_be_dedicated(make):
    with pytest.raises(InvalidArgumentError, match="needs at least 2 ranks"):
        make([variable()], dedicated=True)


def test_parts_of_the_ranks_train_apart(kind, comm, rank, size):
    part = comm.Split(rank % 2, -rank)
    w = variable(float(rank))
    with ONE_SIDED[kind](hpc.SGD(1), [w], part) as opt:
        opt.initialize([w])
        start = float(w.value)
        for _ in range(4):
            opt.minimize(gives(2.0))
        opt.leave()
        while not all(opt.statistics().accepted) or opt.global_step < updates(
            kind, part.size, 4
        ):
            time.sleep(0.001)
        center = opt.center(w)

    # The ranks of a part are reversed: its rank 0 is the last of comm's.
    assert start == max(range(rank % 2, size, 2))
    assert center == start - 2 * updates(kind, part.size, 4)
    part.Free()


def test_several_at_once_do_not_disturb_each_other(comm, size):
    trained = []
    for number, (kind, build) in enumerate([*ONE_SIDED.items()] * 2):
        w = variable(name=f"w{number}")
        opt = build(hpc.SGD(1), [w], comm, host=number % size)
        opt.initialize([w])
        trained.append((kind, opt, w, number + 1.0))
    for _ in range(6):
        for _, opt, _, grad in trained:
            opt.minimize(gives(grad))
    meet()
    for kind, opt, w, grad in trained:
        assert opt.center(w) == -grad * updates(kind, size, 6)
    for _, opt, *_ in reversed(trained):
        opt.free()


@pytest.mark.parametrize("kind", ["SyncReplicas", "DropStale"])
@pytest.mark.ranks(min=2)
def test_after_a_drop_no_rank_computes_what_must_be_dropped(comm, kind, rank, size):
    def slowly():
        time.sleep(0.1)
        return 1.0

    w = variable()
    if kind == "SyncReplicas":
        opt = hpc.SyncReplicasOptimizer(hpc.SGD(slowly), 1, comm=comm)
    else:
        opt = hpc.DropStaleGradientOptimizer(hpc.SGD(slowly), 0, comm=comm)
    opt.initialize([w])
    pairs = computed(opt, 1.0)
    seen = []
    if rank == 0:
        opt.apply_gradients(pairs)
    elif rank == size - 1:
        while not testing.admitted_step(opt):
            time.sleep(0)
        # Rank 0's gradient is admitted but not applied: this rank's parameters are
        # stale, and no newer ones exist.
        seen = [bool(opt.apply_gradients(pairs)), opt.global_step]
        opt.compute_gradients(gives(1.0))
        seen += [float(w.value), opt.global_step]
    opt.free()

    if rank == size - 1:
        assert seen == [False, 0, -1, 1]


# Variables


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_every_dtype_is_kept_and_changed_in_place(make, kind, rank, size, dtype):
    array = np.full(3, float(rank), dtype)
    w = hpc.Variable(array, "w")
    opt = make([w])
    for _ in range(4):
        opt.minimize(gives(np.full(3, 0.5, dtype)))
    meet()
    center = opt.center(w)
    center[0] += 1

    assert w.value is array
    assert array.dtype == center.dtype == dtype
    assert (opt.center(w) == -updates(kind, size, 2)).all()
    if kind == "SyncReplicas":
        assert (array == opt.center(w)).all()


def test_slots_are_those_of_the_host(make, kind, rank, size):
    w = variable(np.zeros(2))
    opt = make([w], hpc.Momentum(1, 0.5), host=size - 1)
    for _ in range(2):
        opt.minimize(gives(np.ones(2)))
    meet()
    slot, count = opt.get_slot(w, "momentum"), len(opt.variables())

    assert opt.get_slot_names() == ["momentum"]
    if rank == size - 1 or kind == "AGN":
        assert slot.shape == (2,)
        assert (slot.value > 0).all()
        assert count == 1 + (kind == "AGN" and rank == size - 1)
    else:
        assert slot is None
        assert count == 0
        # Nor are there any that it hides.
        assert w not in opt.inner._states


# Ranks that disagree


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
        assert type(error) is DisagreementError
        assert f"rank {size - 1}" in str(error)


def test_a_bad_list_on_one_rank_is_refused_by_all(kind, comm, rank, size):
    w = variable()
    for bad, error in (([w.value], TypeError), ([w, w], InvalidArgumentError)):
        with ONE_SIDED[kind](hpc.SGD(1), [w], comm) as opt:
            found = raised(opt.initialize, bad if rank == size - 1 else [w])
            opt.initialize([w])
        assert type(found) is error


def test_bad_pairs_send_nothing_and_disturb_no_rank(make, kind, rank, size):
    w = variable(np.zeros(2))
    opt = make([w])
    bad = [[(np.ones(3), w)], [(np.ones(2), variable(np.zeros(2), name="v"))], []]
    found = [raised(opt.apply_gradients, pairs) for pairs in bad] if rank == 0 else []
    meet()
    before = meet(opt.statistics().accepted)
    for _ in range(2):
        opt.minimize(gives(np.ones(2)))
    meet()

    assert all(isinstance(error, InvalidArgumentError) for error in found)
    assert before == [(0,) * size] * size
    assert (opt.center(w) == -updates(kind, size, 2)).all()


# Ranks that start late or leave


@pytest.mark.parametrize("leaver", ["first", "last"])  # the host, and another one
@pytest.mark.ranks(min=2)
def test_a_rank_leaves_and_the_others_go_on(make, kind, rank, size, leaver):
    w, leaver = variable(), 0 if leaver == "first" else size - 1
    opt = make([w])
    for _ in range(2):
        opt.minimize(gives(1.0))
    if rank == leaver:
        opt.leave()
        before = w.value.copy()
        errors = [raised(opt.apply_gradients, [(1.0, w)]) for _ in range(2)]
        assert [type(error) for error in errors] == [InvalidArgumentError] * 2
        assert all("has left" in str(error) for error in errors)
        assert w.value == before
    else:
        for _ in range(8):
            opt.minimize(gives(1.0))
    meet()

    expected = updates(kind, size, 2) + updates(kind, size - 1, 8)
    assert opt.global_step == expected
    assert opt.center(w) == -expected


def test_nobody_needs_to_train(make):
    w = variable(3.0)
    opt = make([w])

    assert opt.center(w) == 3
    assert opt.global_step == 0
    assert opt.statistics().lags == {}


def test_what_was_never_initialized_says_so(kind, comm):
    w = variable()
    opt = ONE_SIDED[kind](hpc.SGD(1), [w], comm)
    calls = [opt.statistics, opt.leave, opt.serve, lambda: opt.global_step]
    errors = [raised(call) for call in [*calls, lambda: opt.center(w)]]
    waited = opt.waited
    opt.free()

    assert {type(error) for error in errors} == {InvalidArgumentError}
    assert waited == 0
    assert type(raised(opt.initialize, [w])) is hpc.FreedError


def test_initializing_again_changes_nothing(make, kind, size):
    w = variable()
    opt = make([w])
    turns([0, 0], lambda _: bool(opt.minimize(gives(1.0))) if size == 1 else None)
    before = float(w.value)
    opt.initialize([w])
    error = raised(opt.initialize, [variable()])

    assert w.value == before
    assert isinstance(error, InvalidArgumentError)


# Defaults


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


@pytest.mark.parametrize("large", [False, True])
def test_the_servers_that_auto_has_chosen_are_shown(comm, kind, rank, caplog, large):
    elements = (1 << 18) - (not large)
    variables = [hpc.Variable(np.zeros(elements, np.float32), "w")]
    optimizer = ONE_SIDED[kind](hpc.SGD(1), variables, comm)
    with caplog.at_level("INFO", logger="hpcaccum"):
        optimizer.initialize(variables)
    nodes = group_of(comm).nodes
    servers = tuple(ranks[0] for ranks in nodes) if large else (0,)

    assert f", servers={servers!r}, name=" in repr(optimizer)
    assert caplog.messages == [repr(optimizer)] * (rank == 0)
    optimizer.free()
