"""Updates of single gradients that several servers have at a time."""

from __future__ import annotations

import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum.nodes import transfer
from hpcaccum.server import client

from .on_nodes import group_on_nodes as group_on_nodes
from .on_nodes import leads
from .support import WAIT, meet
from .training import gives

COUNT = 600
ONES = np.ones(COUNT)


def drop_stale(group, rule, **options):
    """Return a variable of zeros, its optimizer, and its servers, on all nodes."""
    var, servers = hpc.Variable(np.zeros(COUNT), "w"), [r[0] for r in group.nodes]
    opt = hpc.DropStaleGradientOptimizer(
        rule, 1000, comm=group, servers=servers, **options
    )
    opt.initialize([var])
    return var, opt, servers


def watch_updates(opt, seen, before=lambda: None):
    """Append the gradients of this rank's updates to a list, after some call."""
    role = opt._server._role
    shard = getattr(role, "shard", role)
    update = shard.update

    def watched(grads, rate):
        before()
        seen.append(np.concatenate([each.ravel() for each in grads.values()]))
        return update(grads, rate)

    shard.update = watched


def look_when_there(opt, count):
    """Have the host look for the next gradients when the first ones have arrived.

    It looks again when a server has made an update, for which the test has them wait.
    """
    role, inbox = opt._server._role, opt._server._inbox
    look = getattr(role, "_order_ahead", None)

    def wait_and_look():
        limit = time.monotonic() + WAIT
        while inbox.following(count - 1) is None and time.monotonic() < limit:
            time.sleep(0.001)
        role._order_ahead = look
        look()

    if look is not None:
        role._order_ahead = wait_and_look


def train(group, opt, calls):
    for _ in range(calls):
        opt.minimize(gives(ONES * (group.rank + 1)))
    meet()
    opt.free()


def test_the_next_updates_are_ordered_before_the_first_is_made(group):
    var, opt, servers = drop_stale(group, hpc.SGD(1.0))
    wanted, steps, seen = min(len(servers), client._AT_A_TIME), [], []

    def wait():
        limit = time.monotonic() + WAIT
        while not steps and opt.global_step < wanted and time.monotonic() < limit:
            time.sleep(0.001)
        steps.append(opt.global_step)

    if group.rank == servers[-1]:
        watch_updates(opt, seen, wait)
    if group.rank == servers[0]:
        look_when_there(opt, wanted)
    meet()
    train(group, opt, 3)
    if group.rank == servers[-1]:
        assert steps[0] >= wanted
        assert len(seen) == 3 * group.size
    if group.rank == servers[0]:
        # Nothing is kept of a gradient that was applied.
        assert not opt._server._inbox._found
    assert (var.value == -3 * sum(range(1, group.size + 1))).all()


def test_gradients_of_one_node_are_not_mixed(group, monkeypatch):
    # Several pieces, of which few are on their way at a time.
    monkeypatch.setattr(transfer, "_PIECE", 64)
    _, opt, servers = drop_stale(group, hpc.SGD(1.0))
    seen = []
    if group.rank in servers:
        watch_updates(opt, seen)
    meet()
    train(group, opt, 10)
    assert all((each == each[0]).all() for each in seen)
    if seen:
        found = sorted(each[0] for each in seen)
        assert found == sorted([*range(1, group.size + 1)] * 10)


@pytest.mark.parametrize("slow", [0, -1], ids=["host", "last"])
def test_a_pause_is_between_two_updates_of_all_servers(group, slow):
    var, opt, servers = drop_stale(group, hpc.Adagrad(1.0, 0.5))
    if group.rank == servers[slow]:
        # The servers of other nodes are ahead of this one.
        watch_updates(opt, [], lambda: time.sleep(0.002))
    meet()
    for _ in range(10):
        opt.minimize(gives(ONES))
        if group.rank == servers[0]:
            with opt.paused() as step:
                # The host's own part, as it is, and all parts.
                [mine] = opt.variables()
                assert (mine.value == 0.5 + step).all()
                assert (opt.get_slot(var, "accumulator").value == 0.5 + step).all()
                assert opt.global_step == step
    meet()
    opt.free()


def test_what_is_called_after_an_update_is_called_before_the_next_one(group):
    if len(group.nodes) == group.size:
        pytest.skip("no rank is left to train")
    var, opt, servers = drop_stale(group, hpc.SGD(1.0), dedicated=True)
    steps, centers = [], []

    def after_update(step):
        steps.append(step)
        centers.append(opt.center([var])[0])

    meet()
    if leads(group):
        opt.serve(after_update if group.rank == servers[0] else None)
    else:
        for _ in range(5):
            opt.minimize(gives(-ONES))
        opt.leave()
    meet()
    opt.free()
    if group.rank == servers[0]:
        assert steps == [*range(1, 5 * (group.size - len(servers)) + 1)]
        for step, center in zip(steps, centers, strict=True):
            assert (center == step).all()
