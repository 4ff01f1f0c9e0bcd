"""A center in parts, each on a server of another node."""

import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError
from hpcaccum.errors import format_ranks
from hpcaccum.mpi.job.runtime import MPI
from tests import internals

from ..common import check_error, same_bits
from .acting import until
from .on_nodes import leaders, leads, named, workers
from .support import meet
from .training import ONE_SIDED, RULES, diloco, drawn, gives, raised, several, turns


def flat(arrays):
    return np.concatenate([each.ravel() for each in arrays])


def last_ranks(group):
    return [ranks[-1] for ranks in reversed(group.nodes)]


def train(group, rule, servers, *, calls=3, dtypes=(np.float32,), lacks=()):
    """Make steps with all ranks; return the variables, and the slots on the host.

    Args:
        lacks: Pairs of a call and a variable of which a rank has no gradient, with it.
    """
    variables = several(*dtypes)
    opt = hpc.SyncReplicasOptimizer(rule, group.size, comm=group, servers=servers)
    for call in range(calls):
        grads = drawn(group.rank, call, variables)
        for when, number, ranks in lacks:
            if when == call and group.rank in ranks:
                grads[number] = None
        opt.minimize(lambda grads=grads: (0.0, grads), var_list=variables)
    meet()
    slots = found_slots(opt, variables)
    opt.free()
    # Also after the end.
    for one, other in zip(slots, found_slots(opt, variables), strict=True):
        same_bits(one, other)
    return [var.value for var in variables], slots


def found_slots(opt, variables):
    found = []
    if MPI.COMM_WORLD.rank == internals.servers(opt)[0]:
        for var in variables:
            slots = [opt.get_slot(var, name) for name in opt.get_slot_names()]
            assert all(slot is None or slot.name.startswith(var.name) for slot in slots)
            found += [np.zeros(0) if slot is None else slot.value for slot in slots]
    return found


def compare(one, other):
    for each, those in zip(one, other, strict=True):
        for left, right in zip(each, those, strict=True):
            same_bits(left, right)


# No rank has the vector's gradient in call 1; rank 0 lacks the matrix's in call 2.
LACKING = {
    "dtypes": (np.float16, np.float32, np.float64),
    "lacks": [(1, 2, range(9)), (2, 0, [0])],
    "calls": 4,
}


@pytest.mark.parametrize(
    ("kind", "choose", "options"),
    [
        ("SGD", leaders, {}),
        ("Momentum", last_ranks, {}),
        ("Adagrad", leaders, {}),
        ("Adam", last_ranks, {}),
        ("Adam", leaders, LACKING),
    ],
)
def test_bits_are_those_of_one_server(group, kind, choose, options):
    servers = choose(group)
    alone = train(group, RULES[kind](), servers[0], **options)
    compare(train(group, RULES[kind](), servers, **options), alone)


class Normed(hpc.Optimizer):
    """An update that depends on the whole variable."""

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        for grad, var in grads_and_vars:
            if grad is not None:
                var.value[...] -= grad / (1 + np.linalg.norm(var.value))


def push_in_turn(group, opt, variables, calls):
    for call in range(calls):
        for rank in range(group.size):
            if rank == group.rank:
                grads = drawn(rank, call, variables)
                # A turn may take less time than a rank takes its parameters for new.
                opt.center(variables)
                opt.minimize(lambda grads=grads: (0.0, grads), var_list=variables)
            meet()


def drop_stale(rule, _, group, servers):
    return hpc.DropStaleGradientOptimizer(rule, 0, comm=group, servers=servers)


@pytest.mark.parametrize("make", [drop_stale, ONE_SIDED["AGN"], diloco])
def test_single_gradients_are_applied_in_order(group, make):
    found = []
    for servers in (None, leaders(group)):
        variables = several()
        opt = make(hpc.Momentum(0.1, 0.9), variables, group, servers=servers)
        opt.initialize(variables)
        push_in_turn(group, opt, variables, 4)
        step, tally = opt.global_step, opt.statistics()
        center = opt.center(variables)
        slots = found_slots(opt, variables)
        meet()
        opt.free()
        found.append((center, slots, [var.value for var in variables]))
        pushes = 4 if make is drop_stale else 2
        assert step == sum(tally.accepted) == group.size * pushes
    compare(found[1], found[0])


@pytest.mark.parametrize("rule", [RULES["Momentum"], lambda: Normed("normed")])
def test_late_gradients_have_their_factors_on_all_servers(group, rule):
    found = []
    for servers in (None, leaders(group)):
        variables = several()
        opt = hpc.DropStaleGradientOptimizer(
            rule(), group.size, lateness="inverse", comm=group, servers=servers
        )
        grads = drawn(group.rank, 0, variables)
        pairs = opt.compute_gradients(lambda g=grads: (0.0, g), variables)
        meet()
        receipts = turns(
            range(group.size), lambda _, o=opt, p=pairs: o.apply_gradients(p)
        )
        assert [r.factor for r in receipts] == [1 / (1 + r.lag) for r in receipts]
        assert [r.lag for r in receipts] == [*range(group.size)]
        found.append(([*opt.center(variables)], found_slots(opt, variables)))
        meet()
        opt.free()
    compare(found[1], found[0])
    plain, expected = rule(), several()
    for rank in range(group.size):
        late = [
            grad * grad.dtype.type(1 / (1 + rank)) for grad in drawn(rank, 0, expected)
        ]
        plain.apply_gradients(zip(late, expected, strict=True))
    compare([found[0][0]], [[var.value for var in expected]])


@pytest.mark.parametrize("slow", [False, True], ids=["at_once", "slowly"])
def test_all_parts_are_of_one_step(group, slow):
    # All elements of step k are k.
    variables = several()
    for var in variables:
        var.value[...] = 0
    servers, step = last_ranks(group), hpc.Variable(0, "step")
    opt = hpc.DropStaleGradientOptimizer(
        hpc.SGD(1.0), 1000, comm=group, servers=servers
    )
    opt.initialize(variables)
    steps, grads = [], [-np.ones(var.shape) for var in variables]
    # Meanwhile the server goes on.
    with internals.slow_parts(0.005 * slow):
        for _ in range(20 if not slow else 5):
            opt.minimize(lambda: (0.0, grads), step)
            values = flat(var.value for var in variables)
            assert (values == step.value).all()
            steps.append(values[0])
            if group.rank == servers[0]:
                with opt.paused() as now:
                    center = flat(opt.center(variables))
                assert (center == now).all()
        meet()
        opt.free()
    assert steps == sorted({*steps})
    assert (variables[0].value == opt.global_step).all()
    assert opt.global_step == len(steps) * group.size


@pytest.mark.ranks(min=3)
def test_steps_on_their_way_to_a_slow_node_do_not_mix(group):
    slow, last = group.nodes[-1][0], group.size - 1
    # All elements of step k are k.
    var, servers = hpc.Variable(np.zeros(600, np.float32), "w"), leaders(group)
    step, grad = hpc.Variable(0, "step"), -np.ones(600, np.float32)
    # Each server sends several pieces.
    with internals.slow_parts(0.005, slow), internals.limits(piece=64):
        opt = hpc.SyncReplicasOptimizer(
            hpc.SGD(1.0), group.size + 1, comm=group, servers=servers
        )
        opt.initialize([var])
        if group.rank == last:
            # The first of two for one update: this rank does not wait for it.
            opt.minimize(gives(grad), step)
        # The others can make updates without this one.
        meet()
        if group.rank == last:
            until(lambda: opt.global_step >= 2)
            # Stale, so this rank waits, while its node receives step 1.
            assert not opt.apply_gradients([(grad, var)], step)
        else:
            while step.value < 2:
                opt.minimize(gives(grad), step)
        assert step.value >= 2
        assert (var.value == step.value).all()
        opt.leave()
        opt.free()


def test_a_learning_rate_set_on_the_host_is_that_of_all_servers(group):
    found = []
    for servers in (None, leaders(group)):
        var, rates = hpc.Variable(np.ones(400), "w"), [0.5, 0.25]
        rule = hpc.SGD(lambda rates=rates: rates[0])
        opt = hpc.SyncReplicasOptimizer(rule, group.size, comm=group, servers=servers)
        opt.initialize([var])
        for call in range(3):
            if group.rank == 0 and call == 1:
                rates[0] = 0.125
            if group.rank == 0 and call == 2:
                opt.learning_rate = 2.0
            meet()
            opt.minimize(gives(np.ones(400)))
        meet()
        opt.free()
        found.append([var.value])
    assert (found[0][0] == 1 - 0.5 - 0.125 - 2).all()
    compare([found[1]], [found[0]])


def dedicated(group, rule):
    """Return a variable, its optimizer, and the ranks that only serve."""
    var, servers = hpc.Variable(np.zeros(300), "w"), leaders(group)
    options = {"comm": group, "servers": servers, "dedicated": True}
    opt = hpc.SyncReplicasOptimizer(rule, len(workers(group, servers)), **options)
    opt.initialize([var])
    return var, opt, servers


@pytest.mark.parametrize("calls", [True, False], ids=["serve", "free"])
def test_servers_may_only_serve(group, calls):
    """They do so at the end if they do not call serve()."""
    var, opt, servers = dedicated(group, hpc.SGD(1.0))
    if leads(group):
        assert "does not train" in str(raised(opt.minimize, gives(np.ones(300))))
        if calls:
            opt.serve()
            assert (var.value == -5).all()
    else:
        error = str(raised(opt.serve))
        assert f"rank {group.rank} is not a server ({format_ranks(servers)} " in error
        assert error.endswith("); it must train")
        for _ in range(5):
            opt.minimize(gives(np.ones(300)))
        if calls:
            opt.leave()
    if calls:
        meet()
    opt.free()
    assert (var.value == -5).all()
    assert opt.global_step == 5


def test_memory_is_divided(group):
    servers, var = leaders(group), hpc.Variable(np.zeros(1 << 16), "w")
    opt = hpc.SyncReplicasOptimizer(hpc.Adam(), group.size, comm=group, servers=servers)
    opt.initialize([var])
    opt.minimize(gives(np.ones(1 << 16)))
    slots = sum(slot.value.size for slot in opt.inner.variables())
    meet()
    opt.free()
    share = 2 * (1 << 16) / len(servers)
    assert slots <= 1.1 * share if leads(group) else slots == 0


def test_auto_is_one_rank_of_each_node_for_large_variables(group, caplog):
    caplog.set_level("INFO", logger="hpcaccum")
    for size, rule, expected in (
        (1 << 17, hpc.SGD(1.0), leaders(group)),
        (1 << 17, Normed("normed"), [0]),
        (1 << 16, hpc.SGD(1.0), [0]),
    ):
        var = hpc.Variable(np.zeros(size, np.float64), "w")
        opt = hpc.SyncReplicasOptimizer(rule, group.size, comm=group, servers="auto")
        caplog.clear()
        opt.initialize([var])
        assert f", servers={tuple(expected)!r}, name=" in repr(opt)
        assert caplog.messages == [repr(opt)] * (group.rank == 0)
        opt.free()


@pytest.mark.ranks(min=2)
def test_a_server_needs_ranks_that_train(comm, size):
    with pytest.raises(InvalidArgumentError, match=f"{size} to serve"):
        hpc.SyncReplicasOptimizer(
            hpc.SGD(1.0), 1, comm=comm, servers=list(range(size)), dedicated=True
        )
    with pytest.raises(InvalidArgumentError, match="first of servers must be the host"):
        hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1, comm=comm, servers=[0], host=1)


def test_two_servers_of_one_node_are_refused(group):
    ranks = max(group.nodes, key=len)
    if len(ranks) == 1:
        pytest.skip("no node has two ranks")
    with pytest.raises(InvalidArgumentError, match=f"ranks {ranks[0]} and {ranks[1]}"):
        hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 1, comm=group, servers=ranks)


def test_without_threads_several_servers_are_refused(group, monkeypatch):
    # There is no advice for it: servers that only serve need them, too.
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    servers = leaders(group)
    for only_serves in sorted({False, len(servers) < group.size}):
        opt = hpc.SyncReplicasOptimizer(
            hpc.SGD(1.0), 1, comm=group, servers=servers, dedicated=only_serves
        )
        error = raised(opt.initialize, [hpc.Variable(np.zeros(3), "w")])
        check_error(error, "MPI provides no MPI_THREAD_MULTIPLE")
        assert "dedicated" not in str(error)


def test_a_server_that_does_not_serve_is_named(group, in_vain):
    var, opt, servers = dedicated(group, hpc.SGD(1.0))
    late = servers[-1]
    if group.rank in servers and group.rank != late:
        opt.serve()
    elif group.rank != late:
        message = in_vain(opt.minimize, gives(np.ones(300)), seconds=0.2)
        assert f"update 1 by rank {late}, servers of {named(late)}" in message
        opt.leave()
    else:
        time.sleep(0.6)
        opt.serve()
    meet()
    opt.free()
    assert (var.value == -1).all()


@pytest.mark.parametrize("kind", ["sync", "single"])
def test_servers_are_not_among_the_missing_ranks(group, kind, in_vain):
    servers = leaders(group)
    training = workers(group, servers)
    var = hpc.Variable(np.zeros(300), "w")
    options = {"comm": group, "servers": servers, "dedicated": True}
    if kind == "sync":
        opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), len(training) + 1, **options)
    else:
        opt = hpc.DropStaleGradientOptimizer(hpc.SGD(1.0), 100, **options)
    opt.initialize([var])
    meet()
    if group.rank == training[0]:
        message = in_vain(internals.wait_for, opt, 1)
        assert f"from {format_ranks(training)}" in message
    meet()
    opt.serve() if group.rank in servers else opt.leave()
    meet()
    opt.free()


def test_a_wait_that_was_given_up_is_ended_by_free(group, in_vain):
    var = hpc.Variable(np.zeros(300), "w")
    opt = hpc.SyncReplicasOptimizer(hpc.SGD(1.0), 2, comm=group, servers=leaders(group))
    opt.initialize([var])
    if group.rank == group.size - 1:
        message = in_vain(opt.minimize, gives(np.ones(300)), seconds=0.2)
        assert "waits for 2 gradients at step 0, had 1" in message
    meet()
    opt.free()
    # One gradient is the mean of those that remain.
    assert (var.value == -1).all()


# Servers that are ahead of others


def asynchronous(group, rule, **options):
    """Return a variable of zeros, its optimizer, and its servers, on all nodes."""
    var, servers = hpc.Variable(np.zeros(600), "w"), leaders(group)
    opt = hpc.DropStaleGradientOptimizer(
        rule, 1000, comm=group, servers=servers, **options
    )
    opt.initialize([var])
    return var, opt, servers


@pytest.mark.parametrize("slow", [0, -1], ids=["host", "last"])
def test_a_pause_is_between_two_updates_of_all_servers(group, slow):
    with internals.limits(piece=64):
        var, opt, servers = asynchronous(group, hpc.Adagrad(1.0, 0.5))
        if group.rank == servers[slow]:
            # Those of other nodes are ahead of this one, by several updates.
            internals.before("update", opt, lambda *_: time.sleep(0.002)).start()
        meet()
        for call in range(10):
            opt.minimize(gives(np.full(600, (-1.0) ** call)))
            if group.rank == servers[0]:
                with opt.paused() as step:
                    # The host's own part, as it is, and all parts.
                    [mine] = opt.variables()
                    assert (mine.value == 0.5 + step).all()
                    assert (opt.get_slot(var, "accumulator").value == 0.5 + step).all()
                    assert opt.global_step == step
        meet()
        opt.free()
    # A gradient of one step was not mixed with that of another one.
    assert len(np.unique(var.value)) == 1


def test_what_is_called_after_an_update_is_called_before_the_next_one(group):
    training = workers(group, leaders(group))
    var, opt, servers = asynchronous(group, hpc.SGD(1.0), dedicated=True)
    steps, centers = [], []

    def after_update(step):
        steps.append(step)
        centers.append(opt.center([var])[0])

    meet()
    if leads(group):
        opt.serve(after_update if group.rank == servers[0] else None)
    else:
        for _ in range(5):
            opt.minimize(gives(-np.ones(600)))
        opt.leave()
    meet()
    opt.free()
    if group.rank == servers[0]:
        assert steps == [*range(1, 5 * len(training) + 1)]
        for step, center in zip(steps, centers, strict=True):
            assert (center == step).all()


def test_an_agent_may_see_late_that_its_server_has_ended(group):
    var, servers = hpc.Variable(np.zeros(600), "w"), leaders(group)
    with internals.see_end_late(0.1):
        opt = hpc.SyncReplicasOptimizer(
            hpc.SGD(1.0), group.size, comm=group, servers=servers
        )
        opt.minimize(gives(-np.ones(600)), var_list=[var])
        # All nodes have the last step: no rank waits for an agent any more.
        opt.free()
    assert (var.value == 1).all()
