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
    words += ["--sbatch=--comment=a b"]
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
    assert "#SBATCH --comment='a b'\n" in text
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


@pytest.mark.parametrize("command", ["train --strategy agn", "bench step"])
def test_the_name_of_hpcaccum_may_come_first(command):
    short, long = (
        sbatch("--", *command.split()),
        sbatch("--", "hpcaccum", *command.split()),
    )

    assert (long.stdout, long.stderr) == (short.stdout, "")
    assert ("--save" in long.stdout) == ("train" in command)


@pytest.mark.parametrize("words", [["doctor"], ["hpcaccum", "doctor"]])
def test_other_commands_of_hpcaccum_are_programs(words):
    done = sbatch("--", *words)

    assert "    python -m hpcaccum doctor " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("word", "hint"),
    [("trian", "; did you mean train?"), ("nonesuch", ""), ("./setup.py", "")],
)
def test_a_program_that_is_not_here_is_a_warning(word, hint):
    done = sbatch("--", word, "--strategy", "agn")

    assert done.returncode == 0
    assert f"{word} --strategy agn" in done.stdout
    warning = f"hpcaccum sbatch: warning: {word}: no such program here{hint}\n"
    assert done.stderr == warning


def test_a_program_that_is_a_file_is_no_warning():
    assert sbatch("--", "./pyproject.toml").stderr == ""


def test_between_nodes_is_measured_where_there_are_several():
    for nodes, end in ("1", "progress)"), ("2", "progress wire)"):
        text = sbatch("--nodes", nodes, "--", "bench").stdout
        assert f"{end}\n" in text
        assert (
            f"--array=0-{text.partition('=(')[2].partition(')')[0].count(' ')}\n"
            in text
        )


BAD = {
    "nothing": ([], "no program: hpcaccum sbatch [options] -- train"),
    "nodes": (["--nodes", "0", "--", "bench"], "must be a number from 1, got '0'"),
    "time": (["--time", "long", "--", "bench"], "must be minutes, M:S, H:M:S or D-H"),
    "too short": (
        ["--time", "3", "--", "train", "--strategy", "agn"],
        "--time must be at least 4 minutes: 120 s before its end, the ranks are asked",
    ),
    "option": (["--sbatch=now", "--", "bench"], "must look like --partition=gpu"),
    "option without =": (
        ["--sbatch", "--partition=long", "--", "bench"],
        "--sbatch: expected one argument; write --sbatch=--partition=long",
    ),
    "name": (
        ["--name", "my job", "--", "bench"],
        "must have letters, digits and . _ + - only, got 'my job'",
    ),
    "line break": (
        ["--", "python", "-c", "import os\nprint(1)"],
        "has a line break, which the first lines of a script cannot have",
    ),
    "option too late": (
        ["--", "train", "--strategy", "agn", "--ranks-per-node", "4"],
        "train: unrecognized arguments: --ranks-per-node 4; options of sbatch come bef",
    ),
    "compare": (
        ["--", "train", "--compare"],
        "error: train --compare cannot be continued; use --strategy\n",
    ),
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
    "array": (
        ["--", "bench", "--against", "gloo"],
        "unrecognized arguments: --against gloo\n",
    ),
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
