"""``hpcaccum bench compare``: its judgement, on files written here."""

from __future__ import annotations

import math

import pytest

from hpcaccum import InvalidArgumentError
from hpcaccum.bench.compare import comparison
from hpcaccum.bench.rows import read

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
