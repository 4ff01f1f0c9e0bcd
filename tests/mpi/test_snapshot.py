"""Snapshots of optimizers that exchange gradients, and the runs that they continue."""

import copy
import functools
import threading
import time

import ml_dtypes
import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, group_of
from hpcaccum.optimizers import served

from ..common import check_error, same_bits
from .on_nodes import leaders, workers
from .support import meet
from .training import ONE_SIDED, WRAPPERS, drawn, gives, raised, started, turns

pytestmark = pytest.mark.any_size


class Doubled(hpc.Momentum):
    """A rule that is not elementwise, so servers have whole variables."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = [(2 * grad, var) for grad, var in grads_and_vars]
        super().apply_gradients(pairs, global_step, name)


RULES = {
    "SGD": lambda: hpc.SGD(lambda step: 0.5 / (step + 1)),
    "Momentum": lambda: hpc.Momentum(0.1, 0.9),
    "Adagrad": lambda: hpc.Adagrad(0.1),
    "Adam": lambda: hpc.Adam(0.1),
    "Doubled": lambda: Doubled(0.1, 0.9),
}
SHAPES = {"w": (37,), "m": (5, 3), "s": ()}
CALLS = 6


def fresh(value=1.0, dtype=np.float32, rows=False):
    """Return variables; with ``rows``, another one is sparse."""
    table = hpc.Variable(np.full((9, 2), value, dtype), "table", sparse=True)
    return [
        hpc.Variable(np.full(shape, value, dtype), name)
        for name, shape in SHAPES.items()
    ] + [table] * rows


def same(one, other):
    """Raise AssertionError unless two snapshots are the same, bit for bit."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        elif isinstance(value, np.ndarray):
            same_bits(value, other[key])
        else:
            assert value == other[key], key


def of_host(opt, comm):
    """Return the snapshot of rank 0, the host, when no rank pushes; else None."""
    meet()
    found = opt.snapshot() if comm.rank == 0 else None
    meet()
    return found


def continued(kind, rule, comm, snapshot):
    """Return an optimizer that continues from a snapshot, and its variables."""
    own = fresh(7.0, rows="table" in meet(snapshot)[0]["variables"])
    opt = WRAPPERS[kind](RULES[rule](), own, comm)
    opt.restore(snapshot, own)
    meet()
    return opt, own


def step(opt, own, rank, call):
    grads = drawn(rank, call, own)
    if own[-1].sparse:
        grads[-1] = hpc.IndexedSlices(grads[-1][:3], [rank, call, rank])
    return opt.minimize(gives(*grads), var_list=own)


def newest_step(opt, own, rank, call, _):
    # Between nodes this brings the newest parameters to this node.
    opt.center(own[0])
    return step(opt, own, rank, call)


def train(kind, rule, comm, stops, size):
    """Return the last snapshot and the receipts; the run is interrupted at stops."""
    own, receipts = fresh(rows=True), []
    opt = started(WRAPPERS[kind](RULES[rule](), own, comm), own)
    for call in range(CALLS):
        if call in stops:
            snapshot = of_host(opt, comm)
            opt.free()
            opt, own = continued(kind, rule, comm, snapshot)
        receipts += go_on(kind, opt, own, comm, [call])
    found = of_host(opt, comm)
    opt.free()
    return found, receipts, [var.value for var in own]


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("CrossShard", "Adam"),
        ("CrossShard", "SGD"),
        ("SyncReplicas", "SGD"),
        ("SyncReplicas", "Momentum"),
        ("DropStale", "Adagrad"),
        ("DropStale", "Adam"),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    comm, rank, size, kind, rule
):
    whole, receipts, values = train(kind, rule, comm, (), size)
    found, again, others = train(kind, rule, comm, (1, 2, 5), size)

    assert again == receipts
    if rank == 0:
        same(found, whole)
    for one, other in zip(values, others, strict=True):
        same_bits(one, other)


def test_workers_of_agn_begin_with_the_center(comm, rank, size):
    own = fresh()
    opt = started(WRAPPERS["AGN"](hpc.Momentum(0.1, 0.9), own, comm), own)
    for call in range(3):
        # The last call makes a local step only.
        step(opt, own, rank, call)
    snapshot = of_host(opt, comm)
    opt.free()
    opt, new = continued("AGN", "Momentum", comm, snapshot)
    found = [var.value.copy() for var in new]
    first = step(opt, new, rank, 0)
    opt.free()

    expected = meet(snapshot)[0]
    assert expected["global_step"] == size
    assert not first.sent
    for var, value in zip(new, found, strict=True):
        same_bits(value, expected["variables"][var.name])


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_only_the_host_has_a_snapshot(comm, rank, size, kind):
    own = fresh()
    with started(WRAPPERS[kind](hpc.SGD(1), own, comm, host=size - 1), own) as opt:
        meet()
        found = raised(opt.snapshot)
        meet()

    if rank == size - 1:
        assert found["global_step"] == 0
    else:
        check_error(found, f"call it on rank {size - 1}")


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_a_snapshot_after_the_end_is_the_last_one(comm, rank, kind):
    own = fresh()
    opt = WRAPPERS[kind](hpc.Momentum(0.1, 0.9), own, comm)
    for call in range(2):
        step(opt, own, rank, call)
    opt.free()
    if rank == 0:
        found = opt.snapshot()
        for var in own:
            same_bits(found["variables"][var.name], var.value)
        assert found["global_step"] == opt.global_step
        assert sum(found["tally"]["accepted"]) == sum(opt.statistics().accepted)
        assert found["state"]["w"]["step"] == opt.global_step
        assert found["state"]["w"]["momentum"].any()
        # It is a copy.
        found["variables"]["w"][...] = found["state"]["w"]["momentum"][...] = 7
        again = opt.snapshot()
        same_bits(again["variables"]["w"], own[0].value)
        assert (again["state"]["w"]["momentum"] != 7).any()


@pytest.mark.parametrize("kind", ["SyncReplicas", "DropStale"])
def test_a_snapshot_is_of_one_step_while_others_push(comm, rank, kind, monkeypatch):
    kept_state, snapshot_of = served.kept_state, served.snapshot_of

    def slowly(call):
        def run(*args):
            time.sleep(0.002)
            return call(*args)

        return run

    # Between the copies of the variables and of the slots.
    monkeypatch.setattr(served, "kept_state", slowly(kept_state))
    monkeypatch.setattr(served, "snapshot_of", slowly(snapshot_of))
    own = fresh(0.0)
    opt = WRAPPERS[kind](hpc.Momentum(1.0, 1.0), own, comm)
    found = watched(opt, own, rank)
    if rank == 0:
        assert len({each["global_step"] for each in found}) > 1


@pytest.mark.ranks(min=2)
def test_a_snapshot_of_several_servers_is_of_one_step(group):
    own, servers = fresh(0.0), [0, group.nodes[-1][0]]
    opt = hpc.SyncReplicasOptimizer(
        hpc.Momentum(1.0, 1.0), group.size, comm=group, servers=servers
    )
    found = watched(opt, own, group.rank)
    assert group.rank > 0 or found


def watched(opt, own, rank):
    """Train with gradients of 1; check and return snapshots of rank 0 meanwhile."""
    done, found = threading.Event(), []

    def watch():
        while not done.is_set():
            found.append(opt.snapshot())

    opt.initialize(own)
    watcher = threading.Thread(target=watch, daemon=True)
    meet()
    if rank == 0:
        watcher.start()
    ones = [np.ones(var.shape, var.dtype) for var in own]
    for _ in range(25):
        opt.minimize(gives(*ones), var_list=own)
    done.set()
    if rank == 0:
        watcher.join()
    opt.free()
    for each in found:
        check_count(each)
    return found


def check_count(snapshot):
    """Check that the slot is the number of updates by one, the variable their sum."""
    count = snapshot["global_step"]
    for name in SHAPES:
        assert (snapshot["state"][name]["momentum"] == count).all()
        assert snapshot["state"][name]["step"] == count
        assert (snapshot["variables"][name] == -count * (count + 1) / 2).all()


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.ranks(min=2)
def test_another_number_of_ranks_goes_on(comm, rank, size, kind):
    own = fresh()
    opt = WRAPPERS[kind](hpc.Adam(0.1), own, comm)
    for call in range(2):
        step(opt, own, rank, call)
    snapshot = of_host(opt, comm)
    opt.free()
    fewer = comm.Split(rank == size - 1, rank)
    found = going_on(kind, fewer, snapshot) if rank < size - 1 else None
    meet()
    group_of(fewer).free()
    fewer.Free()

    if rank == 0:
        again, last = found
        same(again["variables"], snapshot["variables"])
        same(again["state"], snapshot["state"])
        assert last["state"]["w"]["step"] > snapshot["state"]["w"]["step"]
        if kind in ONE_SIDED:
            # The counts of those that are missing stay.
            counts = [each["tally"]["accepted"] for each in (snapshot, last)]
            assert counts[1][-1] == counts[0][-1] > 0
            assert sum(counts[1]) > sum(counts[0])


def going_on(kind, comm, snapshot):
    """Return the first and the last snapshot of rank 0; comm has not all ranks."""
    own = fresh(7.0)
    opt = WRAPPERS[kind](hpc.Adam(0.1), own, comm)
    opt.restore(snapshot, own)
    again = opt.snapshot() if comm.rank == 0 else None
    # None pushes before.
    comm.Barrier()
    for call in range(2):
        step(opt, own, comm.rank, call)
    opt.free()
    return (again, opt.snapshot()) if comm.rank == 0 else None


def check_restored(comm, kind, make):
    """Restore a snapshot; return it, and variables that have its values."""
    own, new = make(1.0), make(7.0)
    opt = WRAPPERS[kind](hpc.Momentum(0.1, 0.9), own, comm)
    for call in range(2):
        grads = [(call + 1 + comm.rank) * var.value for var in own]
        opt.minimize(gives(*grads), var_list=own)
    snapshot = of_host(opt, comm)
    opt.free()
    opt = WRAPPERS[kind](hpc.Momentum(0.1, 0.9), new, comm)
    opt.restore(snapshot, new)
    again = of_host(opt, comm)
    opt.free()
    if comm.rank == 0:
        same(again, snapshot)
    return meet(snapshot)[0], new


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *zip(WRAPPERS, 2 * [np.float16, ml_dtypes.bfloat16], strict=True),
        ("SyncReplicas", np.float64),
    ],
)
def test_slots_of_half_precision_are_single(comm, kind, dtype):
    found, _ = check_restored(comm, kind, lambda value: fresh(value, dtype))

    assert found["variables"]["w"].dtype == dtype
    wide = np.float64 if dtype is np.float64 else np.float32
    assert found["state"]["w"]["momentum"].dtype == wide


@pytest.mark.parametrize("kind", WRAPPERS)
def test_device_variables_are_restored(cp, comm, kind):
    found, [w] = check_restored(
        comm, kind, lambda value: [hpc.Variable(cp.full(3, value, np.float32), "w")]
    )

    same_bits(w.value.get(), found["variables"]["w"])


@pytest.mark.ranks(min=2)
def test_shard_groups_restore_their_own(comm, rank, size):
    # One group of each rank: each has its own variables.
    groups = [[each] for each in range(size)]
    own = fresh(float(rank))
    opt = hpc.CrossShardOptimizer(hpc.Adam(0.1), group_assignment=groups, comm=comm)
    step(opt, own, rank, 0)
    snapshot = opt.snapshot()
    expected = own[0].value.copy()
    step(opt, own, rank, 1)
    # Also while it is in use: back to the snapshot.
    opt.restore(snapshot)
    found = own[0].value.copy()
    again = opt.snapshot()
    opt.free()

    same_bits(found, expected)
    same(again, snapshot)


def changed(path, value):
    """Return a function that changes an item of a snapshot."""

    def change(snapshot):
        *outer, last = path.split()
        functools.reduce(dict.__getitem__, outer, snapshot)[last] = value
        return snapshot

    return change


# What is done to a snapshot, and the error.
BAD = [
    (lambda s: None, TypeError, "must come from an optimizer, got None"),
    (
        lambda s: {"epoch": 1, "optimizer": s},
        TypeError,
        "a mapping with ['epoch', 'optimizer']; pass its item \"optimizer\"",
    ),
    (
        changed("variables", {var.name: var.value for var in fresh()[1:]}),
        InvalidArgumentError,
        "different variables: it has ['m', 's']",
    ),
    (
        changed("variables w", np.ones(3, np.float32)),
        InvalidArgumentError,
        "variable 'w' is float32 (37,), in the snapshot it is float32 (3,)",
    ),
    (changed("global_step", -1), InvalidArgumentError, "global_step must be"),
    (
        changed("state w step", -1),
        InvalidArgumentError,
        "'w' has -1 updates in the snapshot",
    ),
    (
        changed("state w", {"momentum": np.zeros(1), "step": 1}),
        InvalidArgumentError,
        "made with another optimizer: of 'w' it has ['momentum', 'step'], and Adam "
        "keeps ['m', 'step', 'v']",
    ),
    (
        changed("state w v", np.ones(2, np.float32)),
        InvalidArgumentError,
        "slot 'v' of 'w' is float32 (37,)",
    ),
]


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_snapshot_that_does_not_fit_changes_nothing(comm, rank, kind):
    own = fresh()
    with WRAPPERS[kind](hpc.Adam(0.1), own, comm) as first:
        first.initialize(own)
        snapshot = of_host(first, comm)
    new = fresh(float(rank))
    with WRAPPERS[kind](hpc.Adam(0.1), new, comm) as opt:
        for spoil, error_type, text in BAD:
            mine = spoil(copy.deepcopy(snapshot)) if rank == 0 else None
            check_error(raised(opt.restore, mine, new), text, kind=error_type)
            assert all((var.value == rank).all() for var in new)
        # It can be used as if there had been no call.
        opt.restore(snapshot, new)
        assert (new[0].value == 1).all()
        go_on(kind, opt, new, comm, range(2))
        before = of_host(opt, comm)
        for spoil, error_type, _ in BAD:
            mine = spoil(copy.deepcopy(snapshot)) if rank == 0 else None
            assert type(raised(opt.restore, mine)) is error_type
        meet()
        after = of_host(opt, comm)
        if rank == 0:
            same(before, after)


def tally(accepted, lags):
    return {"accepted": accepted, "dropped": [0], "nonfinite": [0], "lags": lags}


def test_counts_that_cannot_be_read_are_refused(comm, rank):
    own = fresh()
    state = {name: {"step": 0} for name in SHAPES}
    values = {var.name: var.value for var in own}
    with WRAPPERS["DropStale"](hpc.SGD(1), own, comm) as opt:
        for number in ("x", -1, 1 << 40):
            wrong = {"variables": values, "state": state, "global_step": number}
            assert "global_step must be" in str(raised(opt.restore, wrong, own))
        for counts in ({}, {"accepted": 3}, tally([-1], []), tally([1], [[0, -1]])):
            wrong = {"variables": values, "state": state, "tally": counts}
            assert "tally of a snapshot cannot" in str(raised(opt.restore, wrong, own))


def go_on(kind, opt, own, comm, calls):
    """Make steps whose result is the same each time; return the receipts."""
    receipts = []
    for call in calls:
        if kind in ("CrossShard", "SyncReplicas"):
            receipts.append(step(opt, own, comm.rank, call))
        else:
            act = functools.partial(newest_step, opt, own, comm.rank, call)
            receipts += turns(range(comm.size), act)
    meet()
    return receipts


@pytest.mark.parametrize(
    ("kind", "rule"), [*zip(WRAPPERS, 2 * ["Momentum", "Adam"], strict=True)]
)
def test_an_optimizer_in_use_goes_back_to_a_snapshot(comm, rank, kind, rule):
    own = fresh(rows=True)
    opt = started(WRAPPERS[kind](RULES[rule](), own, comm), own)
    go_on(kind, opt, own, comm, range(3))
    snapshot = of_host(opt, comm)
    go_on(kind, opt, own, comm, range(3, 5))
    opt.restore(snapshot)
    other, new = continued(kind, rule, comm, snapshot)
    for one, two in zip(own, new, strict=True):
        same_bits(one.value, two.value)
    go_on(kind, opt, own, comm, range(5, 8))
    go_on(kind, other, new, comm, range(5, 8))
    found = of_host(opt, comm), of_host(other, comm)
    if rank == 0:
        same(*found)
    # Those of AGN have made a local step since the last push.
    for one, two in zip(own, new, strict=True):
        same_bits(one.value, two.value)
    # No state of earlier variables is kept.
    assert len(opt.variables()) == len(other.variables())
    opt.free()
    other.free()


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("dedicated", [False, True])
def test_several_servers_go_back(group, dedicated):
    var, servers = hpc.Variable(np.zeros(300), "w"), leaders(group)
    number = len(workers(group, servers if dedicated else []))
    options = {"comm": group, "servers": servers, "dedicated": dedicated}
    opt = hpc.SyncReplicasOptimizer(hpc.Momentum(1.0, 0.5), number, **options)
    opt.initialize([var])

    def train(calls):
        if dedicated and group.rank in servers:
            opt.serve()
        else:
            for _ in range(calls):
                opt.minimize(gives(np.ones(300)))
            if dedicated:
                opt.leave()
        meet()

    train(1)
    snapshot = opt.snapshot() if group.rank == 0 else None
    meet()
    if not dedicated:
        train(2)
    opt.restore(snapshot)
    assert (opt.global_step, var.value.max()) == (1, -1)
    meet()
    train(2)
    opt.free()
    same_bits(var.value, np.full(300, -(1 + 1.5 + 1.75)))
    assert opt.global_step == 3


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("rule", ["Adam", "Doubled"])
def test_other_servers_continue(group, rule):
    several = leaders(group)
    expected = trained(group, rule, [0], range(4))
    for before, after in (([0], several), (several, [0]), (several, several)):
        snapshot = trained(group, rule, before, range(2))
        found = trained(group, rule, after, range(2, 4), snapshot)
        if group.rank == 0:
            same(found, expected)


def trained(group, rule, servers, calls, snapshot=None):
    """Return the snapshot after some steps; None if this rank is not the host."""
    own = fresh()
    opt = ONE_SIDED["SyncReplicas"](RULES[rule](), own, group, servers=servers)
    if meet(snapshot)[0] is None:
        opt.initialize(own)
    else:
        opt.restore(snapshot, own)
    for call in calls:
        step(opt, own, group.rank, call)
    found = of_host(opt, group)
    opt.free()
    if group.rank == 0:
        # Also after the end.
        same(opt.snapshot(), found)
    return found
