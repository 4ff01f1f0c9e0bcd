"""A schedule is added by one class, with two methods, and one line in the list."""

import functools

import ml_dtypes
import numpy as np
import pytest

from hpcaccum import Layout, Reducer
from hpcaccum.reducer import selection
from hpcaccum.reducer.schedule import MessageSchedule

from .reducing import OPTIONS, SHAPES, SMALL, Maker
from .test_schedules import check_all_ways

pytestmark = pytest.mark.any_size


class Toy(MessageSchedule):
    """Gathers each bucket to rank 0, sums it there, and broadcasts the sums."""

    name = "toy"
    default_bucket_bytes = 2 * SMALL

    def __init__(self, plan):
        super().__init__(plan)
        self._gathering = []

    def offer(self, count):
        for bucket in self.buckets[len(self._gathering) : count]:
            mine = self.sent[bucket].astype(self.received.dtype)
            parts = np.empty((self._comm.size, mine.size), mine.dtype)
            self._gathering.append((self._comm.Igather(mine, parts), mine, parts))

    def collect(self, number):
        request, _, parts = self._gathering[number]
        self._wait(request.Test)
        total = self.received[self.buckets[number]]
        if self._comm.rank == 0:
            with np.errstate(all="ignore"):
                total[...] = functools.reduce(np.add, parts)
        self._wait(self._comm.Ibcast(total).Test)
        self._divide(self.buckets[number])
        if number + 1 == len(self.buckets):
            self._gathering.clear()


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The list of schedules with one more."""
    monkeypatch.setattr(selection, "SCHEDULES", [*selection.SCHEDULES, Toy])


@pytest.fixture
def maker(comm, monkeypatch):
    monkeypatch.setitem(OPTIONS, "toy", {"schedule": "toy", "bucket_bytes": SMALL})
    maker = Maker(comm, "toy")
    maker.nodes = [range(comm.size)]
    yield maker
    maker.free()


def test_it_is_selected_by_its_name(comm):
    layout = Layout({"x": (3 * SMALL,)}, "float32")
    with Reducer(layout, comm, schedule="toy") as reducer:
        found = reducer.reduce({"x": np.ones(3 * SMALL)})
        statistics = reducer.statistics()

        assert (found["x"] == 1).all()
        assert "toy: 1 calls" in repr(reducer)
    # Its own default size of a bucket.
    assert (statistics.schedule, statistics.buckets) == ("toy", 6)
    assert statistics.window_bytes == statistics.result_bytes == layout.nbytes


def test_it_is_not_selected_by_auto_unless_it_is_preferred(comm, monkeypatch):
    layout = Layout(SHAPES, "float32")
    with Reducer(layout, comm) as reducer:
        assert reducer.statistics().schedule != "toy"

    monkeypatch.setattr(Toy, "preferred", classmethod(lambda cls, case: True))
    monkeypatch.setattr(selection, "SCHEDULES", [Toy, *selection.SCHEDULES])
    with Reducer(layout, comm) as reducer:
        assert reducer.statistics().schedule == "toy"


@pytest.mark.parametrize("dtype", ["float64", ml_dtypes.bfloat16], ids=str)
def test_its_means_equal_numpy_however_ranks_contribute(maker, dtype):
    check_all_ways(maker, dtype)
