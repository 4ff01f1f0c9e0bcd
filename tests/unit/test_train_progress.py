"""What ``hpcaccum train`` prints: few lines of progress, with the time left; tables."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest

from hpcaccum.train.report import Progress, Record, Result, saved, tables


def shown(times, epochs):
    """Return the lines for one record an epoch, at these times."""
    lines = []
    progress = Progress(lines.append, "agn", epochs)
    for epoch, seconds in times:
        progress.show(Record("agn", seconds, epoch, epoch, None, 1.0, 0.5))
    return lines


def test_lines_come_when_the_time_has_doubled():
    lines = shown([(second, float(second)) for second in range(101)], 100)
    epochs = [int(re.search(r"epoch (\d+) of 100", line)[1]) for line in lines]

    assert epochs == [0, 1, 2, 4, 8, 16, 32, 64, 100]
    assert re.match(r"\d\d:\d\d:\d\d agn: epoch 1 of 100, 1.0 s, 99 s left, ", lines[1])
    assert " left" not in lines[0] + lines[-1]


def test_lines_of_a_long_job_come_every_10_minutes():
    lines = shown([(minute, 60.0 * minute) for minute in range(1000)], 2000)
    epochs = [int(re.search(r"epoch (\d+) of", line)[1]) for line in lines]

    assert epochs[:8] == [0, 1, 2, 4, 8, 16, 26, 36]
    assert "996 of 2000" in lines[-1]


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [
        (50, 30.0, "30 s left"),
        (1, 60.0, "99 min left"),
        (1, 3600.0, "99.0 h left"),
    ],
)
def test_time_left(done, seconds, text):
    assert text in shown([(0, 0.0), (done, seconds)], 100)[-1]


def test_a_resumed_job_counts_its_own_epochs():
    # 10 epochs in 10 s; the first 80 were made by another job.
    assert "10 s left" in shown([(80, 0.0), (90, 10.0)], 100)[-1]


def test_more_updates_than_wanted_are_no_further_epoch():
    assert "epoch 1 of 1, " in shown([(0, 0.0), (1.75, 2.0)], 1)[-1]


def result(**facts):
    known = dict.fromkeys(field.name for field in dataclasses.fields(Result))
    return Result(**(known | {"updates": 9, "target": 9, "resumed_at": 0} | facts))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, "checkpoints: s; update 9, from the start"),
        (
            {"resumed_at": 9, "target": 7},
            "checkpoints: s; update 9, resumed at 9; it was complete before: more "
            "--epochs continue it",
        ),
        (
            {"resumed_at": 4, "updates": 6, "stopped": 75},
            "checkpoints: s; update 6, resumed at 4; stopped before 9 (--resume "
            "continues)",
        ),
    ],
)
def test_where_a_run_ended(facts, text):
    assert saved(result(**facts), argparse.Namespace(save="s")) == text


def test_a_slow_run_has_a_rate():
    facts = {"strategy": "agn", "seconds": 9.4, "updates": 1, "accuracy": 0.5}
    facts |= {"updates_per_second": 1 / 9.4, "samples_per_second": 1000 / 9.4}
    facts |= {"accepted": [1], "dropped": [0], "waited": [0.0], "lags": {0: 1}}
    one = result(**facts)
    options = argparse.Namespace(straggler={}, batch=16, strategies=("agn",), period=1)
    lines = [line.split() for line in tables([one], options)]

    assert ["agn", "50.0%", "9.40", "0.11", "106", "1", "0"] in lines


def test_columns_have_one_width():
    facts = {"strategy": "sync-replicas", "seconds": 1234.56, "updates": 1000}
    facts |= {"accuracy": 0.967, "accepted": [12345, 2], "dropped": [678, 0]}
    facts |= {"waited": [98.76, 0.0], "lags": {0: 1, 5: 2, 20: 3, 40: 1}}
    one = result(**facts, updates_per_second=0.8, samples_per_second=9)
    options = argparse.Namespace(straggler={}, batch=16, strategies=("agn",), period=1)
    lines = list(tables([one], options))

    assert "strategy       rank  accepted  dropped   waited" in lines
    assert "sync-replicas  0        12345      678  98.76 s" in lines
    assert "               1            2        0   0.00 s" in lines
