"""The record of a run: that it is read as it was written, and that errors are clear."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.accumulator import Receipt
from hpcaccum.train.data import prepare
from hpcaccum.train.recorder import RunRecorder
from hpcaccum.train.recording import Gradient, data_digest, digests, read

FACTS = {
    "ranks": 3,
    "options": {
        "strategies": ["sync-replicas"],
        "optimizer": "adam",
        "rate": 0.1,
        "batch": 8,
        "period": 10,
        "seed": 5,
        "data": "own.npz",
    },
}
SNAPSHOT = {"variables": {"w": np.ones(2)}, "state": {"w": {"step": 4}}}


class Ranks:
    """Stands for a group: the first rank, with what others send."""

    rank = 0
    nodes = ((0, 1), (2,))

    def __init__(self, *others):
        self._others = others

    def allgather(self, value, what):
        return [value, *self._others]


@pytest.fixture
def data():
    x = np.arange(40.0).reshape(20, 2)
    return prepare("made", x, np.repeat([0, 1], 10))


def note(recorder, *gradients):
    """Note gradients: the step of the parameters, the update or 0, and the loss."""
    for step, update, loss in gradients:
        recorder.loss = loss
        recorder.add(Receipt(update > 0, step, update - 1 if update else step + 1))


@pytest.fixture
def path(tmp_path, data):
    """The record of three updates by ranks 0 and 2."""
    path = tmp_path / "run.jsonl"
    other = RunRecorder(None)
    note(other, (0, 1, 0.125), (1, 2, 0.1))
    recorder = RunRecorder(path)
    recorder.begin(FACTS, (2, 4, 2), data, Ranks())
    note(recorder, (0, 1, 1 / 3), (1, 0, 0.5), (2, 3, math.nan))
    recorder.finish(Ranks((other._accepted(2), None)), SNAPSHOT)
    return path


def test_a_record_is_read_as_it_was_written(path, data):
    found = read(path)

    assert found.updates == [
        (1, [Gradient(0, 0, 0, 1 / 3), Gradient(2, 0, 0, 0.125)]),
        (2, [Gradient(2, 1, 1, 0.1)]),
        # A dropped gradient has a number, too. JSON has no NaN.
        (3, [Gradient(0, 2, 2, None)]),
    ]
    assert (found.strategy, found.optimizer, found.rate) == (
        "sync-replicas",
        "adam",
        0.1,
    )
    assert (found.batch, found.period, found.seed) == (8, 10, 5)
    assert (found.ranks, found.nodes, found.widths) == (3, [[0, 1], [2]], [2, 4, 2])
    assert str(found.data) == "own.npz"
    assert found.data_digest == data_digest(data)
    assert found.arithmetic["NumPy"] == [np.__version__]
    assert found.digests == digests(SNAPSHOT)
    assert list(found.digests) == ["w", "w/step"]


def test_digests_differ_in_bits_shapes_and_dtypes():
    zeros = [np.zeros(2), -np.zeros(2), np.zeros((2, 1)), np.zeros(2, np.int64)]
    found = [digests({"variables": {"w": w}, "state": {}})["w"] for w in zeros]

    assert len(set(found)) == len(zeros)


def edit(path, number, change):
    """Change the object of a line, from 1."""
    lines = path.read_text().splitlines()
    found = json.loads(lines[number - 1])
    change(found)
    lines[number - 1] = json.dumps(found)
    path.write_text("\n".join(lines))


BAD = {
    "empty": (lambda path: path.write_text(""), "is not a record of"),
    "a log": (lambda path: edit(path, 1, dict.clear), "is not a record of"),
    "no text": (lambda path: path.write_bytes(b"\xff\x00"), "not a text file"),
    "a list": (lambda path: path.write_text("[1]\n"), "is not a record of"),
    "a folder": (lambda path: path.unlink() or path.mkdir(), ": Is a directory"),
    "format": (
        lambda path: edit(path, 1, lambda line: line.update(format=2)),
        "has format 2, this version of hpcaccum reads format 1",
    ),
    "cut off": (
        lambda path: path.write_text(path.read_text()[:-10]),
        "is not complete: its last line is missing",
    ),
    "only begun": (
        lambda path: path.write_text(path.read_text().partition("\n")[0]),
        "is not complete",
    ),
    "no update": (
        lambda path: path.write_text(path.read_text().replace('{"update": 2', "{")),
        "line 3 is damaged",
    ),
    "no such rank": (
        lambda path: edit(path, 2, lambda line: line["gradients"][0].insert(0, 3)),
        "line 2 is damaged",
    ),
    "rank 3": (
        lambda path: edit(path, 2, lambda line: line.update(gradients=[[3, 0, 0, 1]])),
        "line 2 is damaged",
    ),
    "step -1": (
        lambda path: edit(path, 2, lambda line: line.update(gradients=[[0, 0, -1, 1]])),
        "line 2 is damaged: ValueError('-1 is less than 0')",
    ),
    "no gradient": (
        lambda path: edit(path, 4, lambda line: line.update(gradients=[])),
        "line 4 is damaged",
    ),
    "nested too deeply": (
        lambda path: path.write_text(
            path.read_text().replace('{"update": 2', "[" * 10**5 + '{"update": 2')
        ),
        "line 3 is damaged",
    ),
    "a surrogate": (
        lambda path: edit(path, 2, lambda line: line.update(gradients="\ud800")),
        "line 2 is damaged",
    ),
    "many batches": (
        lambda path: edit(path, 1, lambda line: line["options"].update(batch=10**18)),
        "line 1 is damaged",
    ),
    "many ranks": (
        lambda path: edit(path, 1, lambda line: line.update(ranks=10**18)),
        "line 1 is damaged",
    ),
    "no digests": (
        lambda path: edit(path, 5, lambda line: line.pop("digests")),
        "line 5 is damaged",
    ),
    "nodes": (
        lambda path: edit(path, 1, lambda line: line.update(nodes=[[0, 1]])),
        "line 1 is damaged",
    ),
    "batch": (
        lambda path: edit(path, 1, lambda line: line["options"].update(batch=0)),
        "line 1 is damaged",
    ),
    "rate": (
        lambda path: edit(path, 1, lambda line: line["options"].update(rate=-0.5)),
        "line 1 is damaged: ValueError('rate -0.5')",
    ),
    "large rate": (
        lambda path: edit(path, 1, lambda line: line["options"].update(rate=9**999)),
        "line 1 is damaged",
    ),
    "strategy": (
        lambda path: edit(
            path, 1, lambda line: line["options"].update(strategies=["x"])
        ),
        "line 1 is damaged",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_record_is_one_line(path, kind):
    change, message = BAD[kind]
    change(path)
    with pytest.raises(InvalidArgumentError) as caught:
        read(path)

    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
