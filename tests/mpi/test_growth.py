"""What calls cost between nodes grows as docs/growth.md says; counted, not timed."""

from __future__ import annotations

import pytest

from ..formulas import check
from .growth import costs
from .on_nodes import group_on_nodes  # noqa: F401

# Operations of all windows are counted.
pytestmark = pytest.mark.own_comm


def test_costs_are_those_of_the_table(group, size):
    check(costs(group), size, len(group.nodes))
