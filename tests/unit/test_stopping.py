"""When SIGUSR1 asks a rank to stop, and when it tells of a lost rank."""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace

import pytest

from hpcaccum.errors import RESTART
from hpcaccum.stopping import Requests


@pytest.mark.parametrize(
    ("asked", "lost", "stops"),
    [
        (10, [], True),
        (10, [10.5], False),
        (10, [9], False),
        (10, [7], True),
        (10, [3, 11], False),
    ],
)
def test_a_signal_at_the_time_of_a_loss_is_no_request(asked, lost, stops, monkeypatch):
    clock, gone = SimpleNamespace(now=0.0), []
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    handler = signal.getsignal(signal.SIGUSR1)
    requests = Requests(math.inf, gone)
    requests.begin()
    try:
        while clock.now < 20 and not requests.status:
            clock.now += 0.125
            gone += [at for at in lost if at == clock.now]
            if clock.now == asked:
                signal.raise_signal(signal.SIGUSR1)
    finally:
        requests.end()
        signal.signal(signal.SIGUSR1, handler)

    assert clock.now == (12 if stops else 20)
    assert requests.status == (RESTART if stops else 0)


def test_a_rank_that_was_lost_before_is_known():
    requests = Requests(-1.0, [3], signals=False)
    requests.begin()
    assert requests.status == RESTART
