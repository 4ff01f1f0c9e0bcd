"""The soak: random operations of all kinds, in which nothing is wrong."""

from __future__ import annotations

import pytest

from hpcaccum import group_of
from tests import soak
from tests.soak import Soak


@pytest.fixture
def group(comm, monkeypatch):
    monkeypatch.setattr(soak, "_OPERATIONS", 40)
    return group_of(comm)


def episodes(monkeypatch, *kinds):
    """Let every episode be one of these."""
    monkeypatch.setattr(soak, "_KINDS", kinds)


def test_nothing_is_wrong_here(group, rank, capfd):
    for seed in range(2):
        assert Soak(group, 0.01, seed)() == 0
    shown = capfd.readouterr().out

    if rank == 0:
        assert shown.count("all counts and sums of") == 2


@pytest.mark.parametrize("kind", ["accumulator", "optimizer", "reducer"])
def test_each_kind_of_episode(group, monkeypatch, kind):
    episodes(monkeypatch, getattr(soak, kind))

    assert Soak(group, 0.1, 1)() == 0
