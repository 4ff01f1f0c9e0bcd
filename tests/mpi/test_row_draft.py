"""Messages with rows, of which some tries are overtaken by updates."""

from __future__ import annotations

import numpy as np
import pytest

from hpcaccum import Group
from hpcaccum.server.double_buffer import DoubleBuffer
from hpcaccum.server.messages import NOTHING
from hpcaccum.server.parameter_copies import SparseCopier
from hpcaccum.server.wire_format import WireFormat

ROWS = {"v": 240, "w": 80}


class Node:
    """A writer of copies: the publisher, or the leader of another node."""

    def __init__(self, group, center):
        wire = WireFormat(center, ROWS)
        self.center = center
        self.copier = SparseCopier(group, 0, wire)
        self.buffer = DoubleBuffer(group, 0, self.copier.size, np.float32)
        self.step = -1

    def publish(self, **changed):
        """Add 1 to rows of variables, and to the other variable."""
        self.copier.note({name: np.array(rows) for name, rows in changed.items()})
        for name, rows in changed.items():
            self.center[name][rows] += 1
        self.center["b"] += 1
        self.step += 1
        flat = self.buffer.begin(self.step)
        self.copier.write(self.center, flat, self.buffer.writing)
        self.buffer.complete(self.step)

    def receive(self, message):
        self.step += 1
        self.copier.unpack(message, self.buffer)
        self.buffer.complete(self.step)

    def newest(self):
        """Return the newest copy, as readers see it."""
        return self.buffer.copy(1 - self.buffer.writing)

    def values(self):
        """Return all variables, as a reader copies them."""
        found = arrays()
        self.copier.read(self.newest(), found, {})
        return found

    def free(self):
        self.buffer.free()
        self.copier.free()


def arrays():
    """Return variables, the sparse ones on both sides of the other."""
    shapes = {"v": (ROWS["v"], 3), "b": (), "w": (ROWS["w"], 2, 2)}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def nodes(comm):
    """The publisher, which has published twice, and a node that has nothing."""
    group = Group(comm.Split(comm.rank))
    made = [Node(group, arrays()) for _ in range(2)]
    made[0].publish()
    made[0].publish(v=[1], w=[2, 5])
    yield made
    for each in made:
        each.free()
    group.free()


@pytest.fixture
def copied(monkeypatch):
    """The number of rows of each try, "all" for whole variables."""
    found, changes = [], SparseCopier.changes

    def note(self, *places):
        rows = changes(self, *places)
        found.append("all" if rows is None else rows.size)
        return rows

    monkeypatch.setattr(SparseCopier, "changes", note)
    return found


def overtaken(here, draft, **changed):
    """Make a try while an update overwrites rows, and the other variable."""
    flat = here.newest().copy()
    views = here.copier.views(flat)
    for name, rows in changed.items():
        views[name][rows] = np.nan
    views["b"][...] = np.nan
    draft.read(flat)
    here.publish(**changed)


def deliver(here, there, draft):
    """Make the last try; the other node has everything then."""
    flat = here.newest().copy()
    draft.read(flat)
    # Updates go on.
    flat.fill(np.nan)
    message = draft.message()
    there.receive(message)
    found = there.values()
    for name, array in here.center.items():
        np.testing.assert_array_equal(found[name], array)
    return message


@pytest.mark.parametrize("updates", range(4))
def test_a_try_copies_only_what_has_changed_since_the_last_one(nodes, copied, updates):
    here, there = nodes
    place = NOTHING
    for first in ("all", 2, 0):
        copied.clear()
        draft = here.copier.draft(place, None)
        for number in range(updates):
            overtaken(here, draft, v=[1, 7 + number], w=[number])
        message = deliver(here, there, draft)
        place = draft.place

        assert copied == [first] + [3] * updates
        # Rows 1, 7 to 9 of v and 0 to 2 of w; before the updates, 3 and 4.
        v, w = (1 + updates) * (updates > 0), updates
        if first == 2:
            v, w = v + 1, w + 1
        values = 3 * ROWS["v"] + 4 * ROWS["w"] if first == "all" else 3 * v + 4 * w
        numbers = 0 if first == "all" else v + w
        assert message.size == 8 + 8 * numbers + 4 * (values + 1)
        if first == "all":
            here.publish(v=[3], w=[4])


def test_everything_is_copied_if_updates_have_changed_too_many_rows(nodes, copied):
    here, there = nodes
    draft = here.copier.draft(NOTHING, None)
    deliver(here, there, draft)
    draft = here.copier.draft(draft.place, None)
    copied.clear()
    here.publish(v=[3])
    overtaken(here, draft, v=[4], w=[9])
    # The log has an entry for every eighth row.
    overtaken(here, draft, v=range(100, 150))
    overtaken(here, draft, w=[4])
    deliver(here, there, draft)
    assert copied == [1, 2, "all", 1]
