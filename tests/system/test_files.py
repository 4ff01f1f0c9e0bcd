"""Files that the commands read and write: what is wrong is one line, at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from ..common import json_lines
from ..programs import run_program

pytestmark = pytest.mark.mpi

TRAIN = "train", "--strategy", "drop-stale", "--epochs", "1"
BENCH = "bench", "allreduce", "--sizes", "4K", "--seconds", "0.01"


def good(path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 200)
    np.savez(path, x=rng.standard_normal((200, 2)) + y[:, None], y=y)
    return path.read_bytes()


def damage(path):
    whole = bytearray(good(path))
    whole[500] ^= 0xFF
    path.write_bytes(whole)


BAD_DATA = {
    "truncated": lambda path: path.write_bytes(good(path)[:1000]),
    "damaged": damage,
    "no zip": lambda path: path.write_bytes(b"PK\x03\x04 and so on"),
    "objects": lambda path: np.savez(path, x=np.array([{}] * 9), y=np.arange(9) % 2),
    "a folder": lambda path: path.mkdir(),
}


def test_bad_data_is_one_line(refused, tmp_path):
    commands = []
    for kind, make in BAD_DATA.items():
        make(tmp_path / f"{kind}.npz")
        commands.append((*TRAIN, "--data", f"{kind}.npz", "--log", "log.jsonl"))

    for kind, shown in zip(BAD_DATA, refused(*commands), strict=True):
        assert f"--data {kind}.npz: " in shown
        # Python objects are not even read.
        assert kind != "objects" or "allow_pickle=False" in shown
    assert not (tmp_path / "log.jsonl").exists()


def test_data_is_never_written_over(refused, tmp_path):
    whole = good(tmp_path / "own.npz")
    (tmp_path / "symbolic.svg").symlink_to("own.npz")
    (tmp_path / "hard.svg").hardlink_to(tmp_path / "own.npz")
    names = "own.npz", f"../{tmp_path.name}/own.npz", "symbolic.svg", "hard.svg"
    outputs = [("--log", name) for name in names]
    outputs += [("--plot", name) for name in names[2:]]
    commands = [(*TRAIN, "--data", "own.npz", *output) for output in outputs]

    assert all("is the same file as --data" in shown for shown in refused(*commands))
    assert (tmp_path / "own.npz").read_bytes() == whole


def test_what_cannot_be_written_is_one_line(refused, tmp_path):
    (tmp_path / "folder.svg").mkdir()
    expected = [
        ((*TRAIN, "--log", "/dev/full"), "--log /dev/full: No space left"),
        ((*TRAIN, "--log", "folder.svg"), "--log folder.svg: Is a directory"),
        ((*TRAIN, "--plot", "folder.svg"), "--plot folder.svg: Is a directory"),
        ((*TRAIN, "--plot", "no/a.svg"), "--plot no/a.svg: No such file"),
        ((*TRAIN, "--log", "a.svg", "--plot", "a.svg"), "is the same file as --log"),
        ((*BENCH, "--json", "/dev/full"), "--json /dev/full: No space left"),
        ((*BENCH, "--plot", "folder.svg"), "--plot folder.svg: Is a directory"),
        ((*BENCH, "--json", "a.svg", "--plot", "a.svg"), "is the same file as --json"),
        (("bench", "scaling", "a.svg", "--plot", "a.svg"), "same file as a.svg"),
    ]
    commands, messages = zip(*expected, strict=True)

    for shown, message in zip(refused(*commands), messages, strict=True):
        assert message in shown
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


@pytest.mark.parametrize("words", [BENCH, (*TRAIN, "--epochs", "999")], ids=["b", "t"])
def test_output_that_nothing_reads_ends_the_command(mpi_environment, tmp_path, words):
    with subprocess.Popen(
        [sys.executable, "-m", "hpcaccum", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env=mpi_environment,
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()

    assert errors == ""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.fixture
def alone(mpi_environment, tmp_path):
    """Run a command without a launcher, and with redirections of a shell."""

    def run(redirections, *words):
        script = f'exec "$@" {redirections}'
        command = ["sh", "-c", script, "sh", sys.executable, "-m", "hpcaccum", *words]
        return run_program(command, timeout=100, cwd=tmp_path, env=mpi_environment)

    return run


def test_a_command_runs_without_open_streams(alone, tmp_path):
    done = alone("<&- >&- 2>&-", *TRAIN, "--log", "log.jsonl")

    assert done.returncode == 0
    first, *_, last = json_lines(tmp_path / "log.jsonl")
    assert (first["event"], last["event"]) == ("start", "result")


@pytest.mark.parametrize("words", [TRAIN, ("sbatch", "--", "x")], ids=["t", "s"])
def test_output_to_a_full_disk_is_one_line(alone, words):
    done = alone(">/dev/full", *words)

    assert done.returncode == 1
    assert done.stdout == "hpcaccum: error: output: No space left on device\n"
