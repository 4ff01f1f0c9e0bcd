"""Updates of single gradients that several servers have at a time."""

from __future__ import annotations

import time

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import testing

from .on_nodes import group_on_nodes as group_on_nodes
from .on_nodes import leads
from .support import meet
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


@pytest.mark.parametrize("slow", [0, -1], ids=["host", "last"])
def test_a_pause_is_between_two_updates_of_all_servers(group, slow):
    with testing.limits(piece=64):
        var, opt, servers = drop_stale(group, hpc.Adagrad(1.0, 0.5))
        if group.rank == servers[slow]:
            # Those of other nodes are ahead of this one, by several updates.
            testing.before_updates(opt, lambda: time.sleep(0.002)).start()
        meet()
        for call in range(10):
            opt.minimize(gives(np.full(COUNT, (-1.0) ** call)))
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
