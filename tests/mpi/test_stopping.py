"""The common last step of ranks that are asked to stop."""

from __future__ import annotations

import math
import signal

import pytest

from hpcaccum import group_of
from hpcaccum.train.stopping import STOPPED, Requests, Stop

from .reducing import made_up
from .support import meet

NODES = "real", "each on its own"


@pytest.fixture(params=NODES)
def group(request, comm, size):
    """The ranks on their nodes, and each on one of its own."""
    if request.param == "real":
        return group_of(comm)
    if size == 1:
        pytest.skip("needs 2 ranks, for two nodes")
    return made_up(comm, "singles")


def steps(group, asked, who):
    """Make steps together until all stop; one rank is asked at one of them."""
    requests = Requests(math.inf)
    stop = Stop(group, requests, says=False)
    step = 5
    with requests.listening():
        while not stop.is_after(step):
            if step == asked and group.rank == who % group.size:
                signal.raise_signal(signal.SIGTERM)
            # The exchange of gradients: nobody ends a step before all have begun it.
            group.allgather(None, "step")
            step += 1
    found = stop.status
    stop.free()
    return step, found


@pytest.mark.parametrize("who", [0, -1])
@pytest.mark.parametrize("asked", [5, 6, 40])
def test_all_stop_after_the_same_step(group, asked, who):
    handler = signal.getsignal(signal.SIGUSR1)
    last, status = steps(group, asked, who)
    signal.signal(signal.SIGUSR1, handler)

    assert {each for each, _ in meet((last, status))} == {last}
    assert status == STOPPED
    assert last in (asked + 1, asked + 2)
