"""``hpcaccum bench scaling``: its figures, from files written here."""

from __future__ import annotations

import json

import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.scaling import report

from .measured import row, write


@pytest.fixture
def measured(tmp_path):
    """Write a file as ``bench --json`` does, of one row; return its path."""

    def make(ranks, nodes, median, nbytes=4096):
        path = tmp_path / f"{ranks}-{nodes}-{nbytes}.jsonl"
        found = row("reducer", median, benchmark="step", bytes=nbytes)
        write(path, [found], ranks=ranks, nodes=nodes)
        return path

    return make


@pytest.fixture
def trained(tmp_path):
    """Write a log as ``train --log`` does; return its path."""

    def write(ranks, hosts, rate):
        start = {"event": "start", "ranks": ranks, "hosts": dict.fromkeys(hosts, 1)}
        end = {"event": "result", "strategy": "agn", "samples_per_second": rate}
        path = tmp_path / f"train-{ranks}.jsonl"
        path.write_text(f"{json.dumps(start)}\n{json.dumps(end)}\n")
        return path

    return write


def shown(capsys, files):
    report(files, None)()
    return capsys.readouterr().out.splitlines()


def test_a_benchmark_should_take_as_long_on_more_ranks(measured, capsys):
    # Any order of files; the job with the fewest ranks is the reference.
    files = [measured(8, 2, 500.0), measured(2, 1, 200.0), measured(4, 1, 250.0)]
    _, heads, _, title, row, *_ = shown(capsys, files)

    assert heads.split() == ["2", "on", "1", "4", "on", "1", "8", "on", "2"]
    assert title == "step, 4 KiB"
    assert " ".join(row.split()) == "reducer 200 us 1.00 250 us 0.80 500 us 0.40"


def test_a_training_should_use_as_many_samples_on_each_rank(trained, capsys):
    files = [trained(2, "a", 100.0), trained(8, "ab", 300.0)]
    _, heads, _, title, row, *_ = shown(capsys, files)

    assert heads.split() == ["2", "on", "1", "8", "on", "2"]
    assert title == "training"
    assert " ".join(row.split()) == "agn 100/s 1.00 300/s 0.75"


def test_a_training_without_updates_is_left_out(trained, capsys):
    # It was stopped at once, or was complete when it was resumed.
    files = [trained(2, "a", 100.0), trained(3, "a", 0.0), trained(8, "ab", 300.0)]
    _, heads, *_ = shown(capsys, files)

    assert heads.split() == ["2", "on", "1", "8", "on", "2"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": "result"}'])
def test_a_damaged_log_is_one_line(line, trained):
    bad = trained(2, "a", 100.0)
    bad.write_text(bad.read_text() + line)

    with pytest.raises(InvalidArgumentError, match=f"{bad}: line 3 is not what"):
        report([bad], None)


def test_what_was_measured_once_is_left_out(measured, capsys):
    files = [measured(2, 1, 1.0), measured(4, 1, 1.0), measured(4, 1, 1.0, 8192)]

    assert not any("8 KiB" in line for line in shown(capsys, files))


def test_files_with_nothing_in_common_are_an_error(measured, tmp_path):
    with pytest.raises(InvalidArgumentError, match="in common that was measured"):
        report([measured(2, 1, 1.0), measured(4, 1, 1.0, 8192)], None)
    other = tmp_path / "other"
    other.write_text("{}\n")
    with pytest.raises(InvalidArgumentError, match="other: line 1 is not what"):
        report([other], None)
    other.write_text("")
    with pytest.raises(InvalidArgumentError, match="other: empty"):
        report([other], None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be written."""
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, *_, **__: figures.append(self))
    return figures


def test_a_picture_says_where_and_when(tmp_path, drawn):
    write(tmp_path / "1", [row()], date="2026-11-27T01:02", hosts={"h1": 2})
    hosts = {"h1": 1, "h2": 1, "h3": 1, "h4": 1}
    facts = {"ranks": 4, "nodes": 4, "hosts": hosts, "date": "2026-11-28T01:02"}
    write(tmp_path / "2", [row()], **facts)
    report([tmp_path / "1", tmp_path / "2"], tmp_path / "x.png")()

    assert drawn[0].texts[0].get_text() == (
        "efficiency: 1 is perfect\nh1; 1 node; 2026-11-27\n"
        "h1, h2, h3 and 1 more; 4 nodes; 2026-11-28"
    )
