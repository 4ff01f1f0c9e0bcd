"""The soak: it finds nothing here, and finds what was planted."""

from __future__ import annotations

import pytest

import hpcaccum as hpc
from hpcaccum import group_of
from hpcaccum.bench.answers import WrongAnswerError
from tests import soak
from tests.soak import Soak, Use

from .training import meet, raised


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


def test_a_gradient_that_is_counted_twice_is_found(group, rank, monkeypatch):
    take = hpc.ConditionalAccumulator.take_grad

    def twice(self, *args, **options):
        found = take(self, *args, **options)
        # That of the last rank, and its number.
        found[group.size - 1] += found[group.size - 1]
        return found

    monkeypatch.setattr(hpc.ConditionalAccumulator, "take_grad", twice)
    episodes(monkeypatch, soak.accumulator)
    error = raised(Soak(group, 5, 0))
    meet()

    assert type(error) is WrongAnswerError or "WrongAnswerError" in str(error)
    assert "gradients and their numbers, of each rank" in str(error)


def test_a_wrong_sum_on_one_rank_is_found(group, rank, monkeypatch):
    wait = hpc.Reducer.wait

    def wrong(self):
        return {name: found + (rank == 0) for name, found in wait(self).items()}

    monkeypatch.setattr(hpc.Reducer, "wait", wrong)
    episodes(monkeypatch, soak.reducer)
    error = raised(Soak(group, 5, 0))

    assert "arrays with wrong sums" in str(error)


def test_a_torn_read_is_found(group, monkeypatch):
    center = hpc.DropStaleGradientOptimizer.center

    def torn(self, var):
        found = center(self, var)
        found[: len(found) // 2] += 1
        return found

    monkeypatch.setattr(hpc.optimizers.one_sided.OneSidedOptimizer, "center", torn)
    episodes(monkeypatch, soak.optimizer)
    error = raised(Soak(group, 5, 0))

    # A rank that has read nothing finds it at the end.
    assert "torn reads" in str(error) or "the sum of all updates" in str(error)


@pytest.mark.parametrize("part", Use._fields)
def test_what_is_not_given_back_is_found(group, rank, monkeypatch, capfd, part):
    calls, held = [], Use.now()

    def leaking():
        calls.append(None)
        more = len(calls) * (10 << 20 if part == "memory" else 1)
        return held._replace(**{part: getattr(held, part) + more})

    monkeypatch.setattr(Use, "now", leaking)
    episodes(monkeypatch, lambda *_: soak.Counter(made=1))
    # From the first episode on, however few there are.
    monkeypatch.setattr(soak, "_WARM", 0)

    assert Soak(group, 0.01, 0)() == 1
    if rank == 0:
        assert "resources leak" in capfd.readouterr().out
