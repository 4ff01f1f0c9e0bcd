"""``hpcaccum sbatch``: what it writes. That it runs: test_slurm."""

from __future__ import annotations

import difflib
import subprocess
import sys

import pytest

from ..common import status_of
from .conftest import REPOSITORY

FOLDER = REPOSITORY / "slurm"
TRAIN = "train", "--strategy", "agn"


def sbatch(*words):
    command = [sys.executable, "-m", "hpcaccum", "sbatch", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


def changed(script, *words):
    """Return the lines in which what is written differs from a script of slurm/."""
    done = sbatch(*words)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (FOLDER / f"{script}.sbatch").read_text().splitlines()
    found = difflib.ndiff(lines, done.stdout.splitlines())
    return [line[2:] for line in found if line.startswith("+ ")]


@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        ("train", TRAIN, "words=(--strategy agn)"),
        ("train", ["hpcaccum", *TRAIN], "words=(--strategy agn)"),
        ("gpu", [*TRAIN, "--device", "cuda"], "words=(--strategy agn --device cuda)"),
        ("bench", ["bench", "all"], "words=(all)"),
        ("program", ["python", "a b.py", "$HOME"], "words=(python 'a b.py' '$HOME')"),
        ("program", ["hpcaccum", "doctor"], "words=(hpcaccum doctor)"),
    ],
)
def test_the_program_is_what_a_script_has_of_its_own(script, words, line):
    assert changed(script, "--", *words) == ["launcher=srun", line]


def test_all_options_come_into_the_script():
    words = ["--nodes", "3", "--ranks-per-node", "2", "--cpus-per-rank", "6"]
    words += ["--gpus-per-node", "2", "--time", "2-1:00", "--name", "mine"]
    words += ["--launcher", "mpiexec", "--setup=module load openmpi"]
    words += ["--setup=ulimit -c 0", "--sbatch=--partition=gpu", "--sbatch=-A us"]
    words += ["--sbatch=--comment=a b", "--sbatch=--signal=B:USR1@300"]
    words += ["--sbatch=--time-min=5"]

    assert changed("train", *words, "--", *TRAIN, "--every", "2m") == [
        "#SBATCH --job-name=mine",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=2",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --time=2-1:00",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --partition=gpu",
        "#SBATCH -A us",
        "#SBATCH --comment='a b'",
        "#SBATCH --time-min=5",
        "module load openmpi",
        "ulimit -c 0",
        "launcher=mpiexec",
        "words=(--strategy agn --every 2m)",
    ]


def test_modules_are_loaded_before_unset_variables_are_errors():
    text = sbatch("--setup=module load x", "--", "bench", "step").stdout

    assert text.index("\nmodule load x") < text.index("set -uo pipefail")


@pytest.mark.parametrize("sweep", ["1,2,4", "4,2,1,1"])
def test_a_sweep_measures_on_each_number_of_nodes_once(sweep):
    lines = changed("bench", "--sweep", sweep, "--", "bench", "step")

    assert {"counts=(1 2 4)", "#SBATCH --nodes=4"} <= {*lines}


BAD = {
    "": "no program: hpcaccum sbatch [options] -- train",
    "--nodes 0 -- bench": "must be an integer of at least 1, got '0'",
    "--time long -- bench": "must be minutes, M:S, H:M:S or D-H",
    "--time 0:03:30 -- train --strategy agn": (
        "--time must be at least 4 minutes: the ranks stop 2 minutes before its end"
    ),
    "--sbatch=now -- bench": "must look like --partition=gpu",
    "--sbatch --partition=long -- bench": (
        "--sbatch: expected one argument; write --sbatch=--partition=long"
    ),
    "--name my/job -- bench": (
        "must have only letters, digits and . _ + -, not - first, got 'my/job'"
    ),
    "--name=-x -- bench": "not - first, got '-x'",
    "-- train --strategy agn --ranks-per-node 4": (
        "train: unrecognized arguments: --ranks-per-node 4; options of hpcaccum sbatch"
    ),
    "-- train --compare": "error: --save is for one run: use --strategy\n",
    "-- train --strategy no": "train: argument --strategy: inv",
    "-- train --strategy sync-replicas --quorum 9": (
        "--quorum must be at most 4, the ranks that train, got 9"
    ),
    "-- train --strategy agn --log s": (
        "train --log cannot be used: the script writes a log for each start"
    ),
    "-- bench stop": "bench: argument benchmark: invalid choice",
    "-- bench step --json f": "bench --json cannot be used: the script sets it",
    "-- bench compare a b": "bench compare needs no job",
    "--sweep 1,2 -- train --strategy agn": (
        "--sweep needs a benchmark, such as bench step"
    ),
    "--sweep 1,2 -- bench wire": "bench wire needs at least 2 nodes",
    "-- bench wire": "bench wire needs at least 2 nodes",
    "--sweep 1,2 -- bench step --csv x.csv": (
        "bench --csv, --plot: with --sweep, several runs would write that file"
    ),
}


@pytest.mark.parametrize("words", BAD)
def test_what_would_fail_days_later_fails_now(words, capsys):
    assert status_of("sbatch", *words.split()) == 2
    shown = capsys.readouterr()

    assert shown.out == ""
    assert BAD[words] in shown.err


# Instead of what SLURM has; the rest of PATH follows.
STUBS = {
    "srun": '#!/bin/bash\n[ "$1" = -N1 ] || eval "$RANKS"',
    "scontrol": '#!/bin/bash\necho "scontrol $*"',
    "sleep": "#!/bin/bash",
    # `python -m hpcaccum run -- ...`; else, the name of the MPI.
    "python": '#!/bin/bash\n[ "$3" = run ] && exec "${@:5}"\necho MPICH',
}
JOB = "JOB_NAME=mine JOB_ID=7 CPUS_PER_TASK=1 NTASKS=1 NTASKS_PER_NODE=1"


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Run a script in a job whose ranks are a shell command; return its output."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for each in JOB.split():
        monkeypatch.setenv(*f"SLURM_{each}".split("="))

    def run(ranks, script="program"):
        monkeypatch.setenv("RANKS", ranks)
        command = ["bash", FOLDER / f"{script}.sbatch"]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_a_program_that_changes_its_directory_asks_to_be_queued_again(executed):
    done = executed('mkdir elsewhere; cd elsewhere; touch "$REQUEUE_FILE"; exit 3')

    assert "scontrol requeue 7\n" in done.stdout


@pytest.mark.parametrize(
    ("array", "task"),
    # The last one; another one; submitted by a task of another array.
    [("7", "7_3"), ("6", "7"), ("9", "7")],
)
def test_of_a_job_array_one_task_is_queued_again(executed, monkeypatch, array, task):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", array)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")

    assert f"scontrol requeue {task}\n" in executed("touch $REQUEUE_FILE").stdout


@pytest.mark.parametrize("restart", [None, "1"])
@pytest.mark.parametrize("script", ["train", "gpu", "program"])
def test_a_job_that_does_not_ask_for_it_ends(executed, monkeypatch, script, restart):
    if restart:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    done = executed("exit 3", script)

    assert (done.returncode, done.stdout) == (3, "")


def test_ranks_of_an_earlier_start_do_not_ask_for_a_later_one(executed, monkeypatch):
    first = executed("echo $REQUEUE_FILE").stdout
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    assert first != executed("echo $REQUEUE_FILE").stdout
