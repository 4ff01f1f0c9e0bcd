"""``hpcaccum bench compare`` and ``bench scaling``: judgement and figures, on files."""

from __future__ import annotations

import json
import math

import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.compare import comparison
from hpcaccum.bench.rows import read
from hpcaccum.bench.scaling import report

from ..common import status_of
from .measured import reference, row, write


@pytest.fixture
def compare(tmp_path, capsys):
    """Compare rows; return the exit status, the line of each row, and the notes."""

    def run(old, new):
        write(tmp_path / "old", old)
        write(tmp_path / "new", new)
        files = tmp_path / "old", tmp_path / "new"
        status = comparison(*files, tolerance=0.1)()
        shown = capsys.readouterr().out.splitlines()
        # But for the names of files.
        assert max(len(line) for line in shown if str(tmp_path) not in line) <= 80
        end = next(place for place, line in enumerate(shown) if line[:5] == "time:")
        # The titles of the table, a rule, and that of a single benchmark come first.
        return status, [line.split() for line in shown[3:end]], shown[end + 3 :]

    return run


JUDGED = {
    "the same": (10.0, 10.0, "not slower"),
    "slower": (11.1, 10.0, "slower"),
    "within the tolerance": (10.9, 10.0, "not slower"),
    "faster": (9.0, 10.0, "not slower"),
    "a slower machine": (20.0, 20.0, "not slower"),
    "slower on a slower machine": (40.0, 20.0, "slower"),
    "slower on a faster machine": (10.0, 5.0, "slower"),
    "faster on a slower machine": (10.0, 20.0, "not slower"),
}


@pytest.mark.parametrize("case", JUDGED)
def test_rows_are_judged_by_the_ratio_to_their_reference(case, compare):
    ours, mpi, verdict = JUDGED[case]
    status, lines, _ = compare(
        [row(), reference()], [row("zero-copy", ours), reference(median_us=mpi)]
    )

    assert status == (verdict == "slower")
    expected = ["4", "KiB", "zero-copy", "10.0", "us", f"{ours:#.3g}", "us"]
    expected += [f"{ours / 10:.2f}", f"{ours / mpi:.2f}", "0%", "MPI"]
    assert lines[0] == [*expected, *verdict.split()]
    assert lines[1][-4:] == [f"{mpi / 10:.2f}", "-", "-", "-"]


def test_each_row_has_its_own_reference(compare):
    # By name if it has one, else the first of its size.
    old = [row("a", raw="Get"), row("b", raw=None), reference("copy"), reference("Get")]
    other = [row("b", raw=None, bytes=8192), reference("copy", bytes=8192)]
    new = [row("a", 20.0, raw="Get"), row("b", 30.0, raw=None)]
    new += [reference("copy", 30.0), reference("Get", 20.0)]
    status, lines, _ = compare(old + other, new + other)

    assert status == 0
    assert [line[-3] for line in lines] == ["Get", "copy", "-", "-", "copy", "-"]
    # A size is shown once.
    assert [line[0] for line in lines] == ["4", "b", "copy", "Get", "8", "copy"]


def test_without_a_reference_in_both_files_times_are_compared(compare):
    old = [row("zero-copy", 10.0), row("alone", raw=None, benchmark="x")]
    new = [row("zero-copy", 12.0), row("alone", raw=None, benchmark="x")]
    status, lines, notes = compare([*old, reference()], new)

    assert status == 1
    assert lines[0][-6:] == ["1.20", "1.20", "0%", "none:", "times", "slower"]
    assert lines[2][-4:] == ["none:", "times", "not", "slower"]
    assert not any("references took" in note for note in notes)


@pytest.mark.parametrize(
    ("ratio", "spread", "verdict", "status"),
    [
        (1.0, 140.7, "undecided", 2),
        (0.5, 5.0, "not slower", 0),
        (0.8, 5.0, "undecided", 2),
        (1.09, 0.0, "not slower", 0),
        (1.09, 0.1, "undecided", 2),
        (1.2, 0.5, "slower", 1),
        (1.2, 1.0, "undecided", 2),
        (1.22, 1.0, "slower", 1),
    ],
)
def test_a_row_whose_noise_could_hide_it_is_undecided(
    compare, ratio, spread, verdict, status
):
    old = [row(), row("flat"), reference()]
    new = [
        row("zero-copy", 10 * ratio, spread_us=spread * ratio),
        row("flat"),
        reference(),
    ]
    found, lines, notes = compare(old, new)

    assert (found, " ".join(lines[0]).endswith(f"MPI {verdict}")) == (status, True)
    assert notes[-1] == (
        f"3 rows compared, {int(status == 1)} slower by more than 10% and the noise, "
        f"{int(status == 2)} undecided"
    )


@pytest.mark.parametrize("median", ["x", None, 0, -1, math.nan])
def test_a_line_with_another_kind_of_value_is_named(median, tmp_path):
    write(tmp_path / "rows", [row(), reference(median_us=median)])

    with pytest.raises(InvalidArgumentError, match="rows: line 2 is not what"):
        read(tmp_path / "rows")


def test_what_is_not_the_same_is_reported(tmp_path, capsys):
    write(tmp_path / "a", [row(), reference()], cpu="old one", cores=2)
    extra = [row(bytes=8192), reference(bytes=8192)]
    write(tmp_path / "b", [row(), reference(), *extra], cpu="new one", cores=2)
    status = comparison(tmp_path / "a", tmp_path / "b", tolerance=0.1)()
    shown = capsys.readouterr().out

    assert status == 0
    assert "other cpu: old one before, new one now\n" in shown
    assert f"only in {tmp_path / 'b'}: 2 rows\n" in shown
    assert "cores" not in shown


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ((18.0, 18.0, 5.0), "1.80 times as long: the machine was slower as a whole"),
        ((5.0, 5.0, 10.0), "0.50 times as long: the machine was faster as a whole"),
        ((10.5, 10.5, 90.0), "1.05 times as long"),
    ],
)
def test_the_speed_of_the_machine_is_the_median_of_the_references(times, text, compare):
    names = "MPI", "exchange", "copy"
    old = [row(), *(reference(name) for name in names)]
    new = [row(), *map(reference, names, times)]
    *notes, last = compare(old, new)[2]

    assert f"the references took {text}" in notes
    assert last.startswith("4 rows compared, ")


UNUSABLE = {
    "no": (None, "No such file"),
    "empty": (b"", "empty"),
    "picture": (b"\x89PNG", "not a text file"),
    "object": (b"{}\n", "line 1 is not what hpcaccum bench --json writes"),
    "list": (b"[1]\n", "line 1 is not what"),
    "brace": (b"{", "line 1 is not what"),
}


@pytest.mark.parametrize("bad", UNUSABLE)
def test_an_unusable_file_is_one_line_and_the_status_2(bad, tmp_path, capsys):
    content, text = UNUSABLE[bad]
    good, bad = tmp_path / "good", tmp_path / bad
    write(good, [row(), reference()])
    if content is not None:
        bad.write_bytes(content)

    for words in ("compare", good, bad), ("compare", bad, good), ("scaling", bad):
        assert status_of("bench", *map(str, words)) == 2
        shown = capsys.readouterr().err
        assert f"error: {bad}: {text}" in shown
        assert len(shown.splitlines()) == 1


# ``hpcaccum bench scaling``


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


def scaled(capsys, files):
    report(files, None)()
    return capsys.readouterr().out.splitlines()


def test_a_benchmark_should_take_as_long_on_more_ranks(measured, capsys):
    # Any order of files; the job with the fewest ranks is the reference.
    files = [measured(8, 2, 500.0), measured(2, 1, 200.0), measured(4, 1, 250.0)]
    _, heads, _, title, row, *_ = scaled(capsys, files)

    assert heads.split() == ["2", "on", "1", "4", "on", "1", "8", "on", "2"]
    assert title == "step, 4 KiB"
    assert " ".join(row.split()) == "reducer 200 us 1.00 250 us 0.80 500 us 0.40"


def test_a_training_should_use_as_many_samples_on_each_rank(trained, capsys):
    files = [trained(2, "a", 100.0), trained(8, "ab", 300.0)]
    _, heads, _, title, row, *_ = scaled(capsys, files)

    assert heads.split() == ["2", "on", "1", "8", "on", "2"]
    assert title == "training"
    assert " ".join(row.split()) == "agn 100/s 1.00 300/s 0.75"


def test_a_training_without_updates_is_left_out(trained, capsys):
    # It was stopped at once, or was complete when it was resumed.
    files = [trained(2, "a", 100.0), trained(3, "a", 0.0), trained(8, "ab", 300.0)]
    _, heads, *_ = scaled(capsys, files)

    assert heads.split() == ["2", "on", "1", "8", "on", "2"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"event": "result"}'])
def test_a_damaged_log_is_one_line(line, trained):
    bad = trained(2, "a", 100.0)
    bad.write_text(bad.read_text() + line)

    with pytest.raises(InvalidArgumentError, match=f"{bad}: line 3 is not what"):
        report([bad], None)


def test_what_was_measured_once_is_left_out(measured, capsys):
    files = [measured(2, 1, 1.0), measured(4, 1, 1.0), measured(4, 1, 1.0, 8192)]

    assert not any("8 KiB" in line for line in scaled(capsys, files))


def test_files_with_nothing_in_common_are_an_error(measured):
    with pytest.raises(InvalidArgumentError, match="in common that was measured"):
        report([measured(2, 1, 1.0), measured(4, 1, 1.0, 8192)], None)
