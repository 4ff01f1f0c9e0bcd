"""Reports on optimizers that exist only here, by a clock that the tests set."""

from __future__ import annotations

import json

import pytest

import hpcaccum as hpc
from hpcaccum import metrics


class Trained:
    """What an optimizer has done so far."""

    def __init__(self):
        self.step, self.waited, self.lags = 0, 0.0, {}

    def _metrics(self):
        tally = hpc.Tally((self.step, 0), (0, 3), dict(self.lags))
        return metrics.Metrics("mine", self.step, self.waited, tally)


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time that the module sees."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_a_report_has_what_has_changed_since_the_last(clock):
    reports, source = [], Trained()
    with hpc.log_to(reports.append, every="10s"):
        metrics.note(source)
        for now, step, waited, lags in [
            (109.9, 4, 1, {0: 4}),
            (110.0, 5, 2, {0: 5}),
            (115.0, 6, 2, {0: 5, 1: 1}),
            (130.0, 15, 7, {0: 5, 1: 10}),
        ]:
            clock[0], source.step, source.waited, source.lags = now, step, waited, lags
            metrics.note(source)
        clock[0] += 1
        assert len(reports) == 2
    metrics.note(source)
    assert len(reports) == 3

    rates = [each["updates_per_second"] for each in reports]
    assert rates == [5 / 10, 10 / 20, 0]
    assert [each["waiting"] for each in reports] == [2 / 10, 5 / 20, 0]
    assert [each["lags"] for each in reports] == [{0: 5}, {1: 10}, {}]
    assert [each["accepted"] for each in reports] == [[5, 0], [15, 0], [15, 0]]
    assert {each["optimizer"] for each in reports} == {"mine"}
    assert reports[0]["dropped"] == [0, 3]


def test_the_last_report_is_also_on_an_optimizer_that_the_program_has_dropped():
    reports = []

    def train():
        metrics.note(Trained())

    with hpc.log_to(reports.append):
        train()
    assert len(reports) == 1


def test_each_optimizer_and_each_log_has_reports_of_its_own(clock):
    first, second, sources = [], [], (Trained(), Trained())
    with hpc.log_to(first.append, every=1), hpc.log_to(second.append, every="1m"):
        for clock[0] in (100.0, 101.0):
            for source in sources:
                metrics.note(source)
        assert (len(first), len(second)) == (2, 0)
    assert (len(first), len(second)) == (4, 2)


def test_a_file_gets_lines_of_json(tmp_path):
    source = Trained()
    with hpc.log_to(tmp_path / "log.jsonl"):
        metrics.note(source)
        source.step, source.lags = 3, {2: 3}
    line = json.loads((tmp_path / "log.jsonl").read_text())

    assert (line["step"], line["lags"]) == (3, {"2": 3})


@pytest.mark.parametrize("arguments", [(3,), ("no/such/file",), (print, "soon")])
def test_bad_arguments(arguments):
    with pytest.raises(hpc.InvalidArgumentError):
        hpc.log_to(*arguments)
    assert not metrics._logs
