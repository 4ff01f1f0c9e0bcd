"""Count the rows that are copied between a center, what is published, and variables."""

from __future__ import annotations

import threading

import pytest

from hpcaccum.server import parameter_copies


@pytest.fixture(name="copies")
def copies_fixture(monkeypatch):
    """The number of rows of each copy of a table; "all" for a whole one.

    Those of agents, between the two copies of a node, are not counted.
    """
    copied = []
    copy_rows = parameter_copies.copy_rows

    def count(source, target, rows):
        if not threading.current_thread().name.startswith("agent"):
            copied.append("all" if rows is None else rows.size)
        copy_rows(source, target, rows)

    monkeypatch.setattr(parameter_copies, "copy_rows", count)
    return copied
