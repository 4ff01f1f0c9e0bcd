"""The common last step of ranks that are asked to stop."""

from __future__ import annotations

import math

import pytest

from hpcaccum import Group
from hpcaccum.train import stopping
from hpcaccum.train.stopping import STOPPED, Requests, Stop

from ..common import every_pair
from .reducing import made_up
from .support import meet

NODES = "real", "each on its own"


@pytest.fixture(params=NODES)
def group(request, comm, size):
    """The ranks on their nodes, and each on one of its own."""
    if request.param == "real":
        return Group.of(comm)
    if size == 1:
        pytest.skip("needs 2 ranks, for two nodes")
    return made_up(comm, "singles")


def steps(group, asked, start=5, who=-1):
    """Make steps together until all stop; one rank is asked at one of them."""
    requests = Requests(math.inf)
    stop = Stop(group, requests, 1, 0, says=False)
    step = start
    while not stop.is_after(step):
        if step == asked and group.rank == who % group.size:
            requests._signaled = STOPPED
        # The exchange of gradients: nobody ends a step before all have begun it.
        group.allgather(None, "step")
        step += 1
    found = stop.status
    stop.free()
    return step, found


@pytest.mark.parametrize(
    ("group", "asked", "who"),
    every_pair(NODES, [5, 6, 20, 21, 22, 23, 40, 170], [0, -1]),
    indirect=["group"],
)
def test_all_stop_after_the_same_step(group, monkeypatch, asked, who):
    # Left to themselves, some would look seldom and others at each step.
    monkeypatch.setattr(stopping, "_LOOK", 100.0 * (group.rank % 2))
    last, status = steps(group, asked, who=who)

    assert {each for each, _ in meet((last, status))} == {last}
    assert status == STOPPED
    assert asked < last <= asked + 2 * stopping._MOST + 1


def test_ranks_that_look_at_each_step_stop_at_once(group, monkeypatch):
    # No look is as long as a step.
    monkeypatch.setattr(stopping, "_LOOK", 0.0)

    assert steps(group, 50)[0] in (51, 52)
