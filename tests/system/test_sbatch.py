"""``hpcaccum sbatch``: what it writes. That it runs: test_slurm."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from .conftest import REPOSITORY

SCRIPTS = sorted((REPOSITORY / "slurm").glob("*.sbatch"))


def sbatch(*words):
    command = [sys.executable, "-m", "hpcaccum", "sbatch", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_what_it_writes(path):
    text = path.read_text()
    words = shlex.split(text.splitlines()[1].partition("# Written by: ")[2])
    done = sbatch(*words[2:])

    assert words[:2] == ["hpcaccum", "sbatch"]
    assert done.stdout == text
    assert done.stderr == ""


def test_all_options_come_into_the_script():
    words = ["--nodes", "3", "--ranks-per-node", "2", "--cpus-per-rank", "6"]
    words += ["--gpus-per-node", "2", "--time", "2-1:00", "--name", "mine"]
    words += ["--launcher", "mpiexec", "--setup=module load openmpi"]
    words += ["--setup=ulimit -c 0", "--sbatch=--partition=gpu", "--sbatch=-A us"]
    done = sbatch(*words, "--", "train", "--strategy", "agn", "--epochs", "7")
    text = done.stdout

    for directive in (
        "job-name=mine",
        "nodes=3",
        "ntasks-per-node=2",
        "cpus-per-task=6",
        "gpus-per-node=2",
        "time=2-1:00",
        "partition=gpu",
        "signal=B:USR1@120",
    ):
        assert f"#SBATCH --{directive}\n" in text
    assert "#SBATCH -A us\n" in text
    assert "\nmodule load openmpi\nulimit -c 0\n" in text
    assert "\nmpiexec -n" in text
    assert "srun" not in text
    assert "python -m hpcaccum train --strategy agn --epochs 7 \\\n" in text
    # The same words write it again, whatever their order was.
    again = sbatch(*shlex.split(text.splitlines()[1].partition("sbatch ")[2]))
    assert again.stdout == text


def test_an_interval_of_checkpoints_needs_no_directory():
    done = sbatch("--", "train", "--strategy", "agn", "--every", "2m")

    # The script has the directory.
    assert (done.returncode, done.stderr) == (0, "")
    assert "train --strategy agn --every 2m \\\n" in done.stdout
    assert "--save" in done.stdout


def test_modules_are_loaded_before_unset_variables_are_errors():
    text = sbatch("--setup=module load x", "--", "bench", "soak").stdout

    assert text.index("module load x") < text.index("set -uo pipefail")
    # It writes no JSON lines.
    assert "python -m hpcaccum bench soak \\\n" in text
    assert "--json" not in text


def test_words_of_a_program_are_quoted():
    done = sbatch("--", "python", "it's mine.py", "a b", "$HOME")

    assert "python 'it'\"'\"'s mine.py' 'a b' '$HOME'" in done.stdout
    bash = ["bash", "-n"]
    assert subprocess.run(bash, input=done.stdout, text=True).returncode == 0


BAD = {
    "nothing": ([], "no program: hpcaccum sbatch [options] -- train"),
    "nodes": (["--nodes", "0", "--", "bench"], "must be a number from 1, got '0'"),
    "time": (["--time", "long", "--", "bench"], "must be minutes, M:S, H:M:S or D-H"),
    "too short": (
        ["--time", "3", "--", "train", "--strategy", "agn"],
        "--time must be at least 4 minutes: 120 s before its end, the ranks are asked",
    ),
    "option": (["--sbatch=now", "--", "bench"], "must be such as --partition=gpu"),
    "train": (["--", "train", "--strategy", "no"], "train: argument --strategy: inv"),
    "ranks": (
        ["--", "train", "--strategy", "sync-replicas", "--quorum", "9"],
        "--quorum must be at most 4, the ranks that train, got 9",
    ),
    "chosen": (
        ["--", "train", "--strategy", "agn", "--save", "s"],
        "train --save: the script sets it",
    ),
    "record": (
        ["--", "train", "--strategy", "agn", "--record", "r"],
        "train --record cannot be used with --resume, which the script sets",
    ),
    "bench": (["--", "bench", "stop"], "bench: argument benchmark: invalid choice"),
    "json": (
        ["--", "bench", "step", "--json", "f"],
        "bench --json: the script sets it",
    ),
    "array": (["--", "bench", "--against", "gloo"], "unrecognized arguments: --aga"),
    "no job": (["--", "bench", "compare", "a", "b"], "bench compare needs no job"),
    "sweep": (
        ["--sweep", "1,2", "--", "train", "--strategy", "agn"],
        "--sweep is for a benchmark that srun starts",
    ),
    "sweep array": (["--sweep", "1,2", "--", "bench"], "--sweep needs one benchmark"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_fail_days_later_fails_now(case):
    words, message = BAD[case]
    done = sbatch(*words)

    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert "Traceback" not in done.stderr
