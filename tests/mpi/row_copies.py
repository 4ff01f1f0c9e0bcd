"""Count the rows that are copied between a center, what is published, and variables."""

from __future__ import annotations

import pytest

from hpcaccum.server import parameter_copies


@pytest.fixture(name="copies")
def copies_fixture(monkeypatch):
    """The number of rows of each copy of a table; "all" for a whole one."""
    copied = []
    copy_rows, copy = parameter_copies.copy_rows, parameter_copies.SparseCopies._copy

    def count(source, target, rows):
        copied.append(rows.size)
        copy_rows(source, target, rows)

    def watch(self, source, target, names, rows):
        copied.extend(["all"] * (rows is None))
        copy(self, source, target, names, rows)

    monkeypatch.setattr(parameter_copies, "copy_rows", count)
    monkeypatch.setattr(parameter_copies.SparseCopies, "_copy", watch)
    return copied
