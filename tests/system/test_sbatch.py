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
    # The program and the packages are those of the user.
    assert all(": warning: " in line for line in done.stderr.splitlines())


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
    text = sbatch("--setup=module load x", "--", "bench", "step").stdout

    assert text.index("module load x") < text.index("set -uo pipefail")


def test_words_of_a_program_are_quoted():
    done = sbatch("--", "python", "it's mine.py", "a b", "$HOME")

    assert "python 'it'\"'\"'s mine.py' 'a b' '$HOME'" in done.stdout
    bash = ["bash", "-n"]
    assert subprocess.run(bash, input=done.stdout, text=True).returncode == 0


def test_a_training_without_a_picture_is_asked_for_none():
    with_picture, without = (
        sbatch("--", "train", "--strategy", "agn", *words).stdout
        for words in ([], ["--no-plot"])
    )

    assert '--log "$log" --plot "$name.png" "$@"' in with_picture
    assert "-JOB.png" in with_picture
    assert '--log "$log" "$@"' in without
    assert "png" not in without


@pytest.mark.parametrize("sweep", ["1,2,4", "4,2,1,1"])
def test_a_sweep_measures_on_each_number_of_nodes_once(sweep):
    done = sbatch("--sweep", sweep, "--", "bench", "step")

    assert "\nfor nodes in 1 2 4; do\n" in done.stdout
    assert "#SBATCH --nodes=4\n" in done.stdout
    assert "# Measures on 1, 2, 4 nodes, one after the other" in done.stdout


def test_a_time_limit_of_0_is_none():
    done = sbatch("--time", "0", "--", "train", "--strategy", "agn")

    assert "#SBATCH --time=0\n" in done.stdout


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


BARE = """
import sys
sys.modules.update(dict.fromkeys(["matplotlib", "sklearn", "cupy", "torch"]))
from hpcaccum.cli import main
sys.exit(main(["sbatch", *sys.argv[1:]]))
"""
PICTURE = "matplotlib, which draws the picture, is not installed here: install it where"
DIGITS = "scikit-learn, which provides the digits, is not installed here: install it wh"
CUPY = "CuPy, which uses the device, is not installed here: install it where the job"
TORCH = "PyTorch, which is measured, is not installed here: install it where the job"
NO_GPUS = "no GPUs are requested: add --gpus-per-node, unless the nodes give them all"
MISSING = {
    "train --strategy agn": [PICTURE, DIGITS],
    "train --strategy agn --no-plot --data pyproject.toml": [],
    "train --strategy agn --no-plot --data no.npz": [
        "--data no.npz: no such file here"
    ],
    "bench step": [],
    "bench step --plot x.png": [PICTURE],
    "bench allreduce --against gloo": [TORCH],
    "bench torch": [TORCH],
    "bench device": [NO_GPUS, CUPY],
    "python": [],
    "python -m mine --here": [],
    "python -u no.py --here": ["no.py: no such file here"],
}


def bare(*words):
    """Write a script where optional packages are missing."""
    command = [sys.executable, "-c", BARE, *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)


def warned(done, expected):
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected), done.stderr
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"hpcaccum sbatch: warning: {text}")
    return done.returncode == 0 and done.stdout.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("program", MISSING)
def test_what_may_be_missing_where_the_job_runs_is_a_warning(program):
    assert warned(bare("--", *program.split()), MISSING[program])


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ([], [NO_GPUS, CUPY]),
        (["--gpus-per-node", "2"], [CUPY]),
        (["--sbatch=--gres=gpu:2"], [CUPY]),
        (["--sbatch=-G 2"], [CUPY]),
    ],
)
def test_gpus_that_are_not_requested_are_a_warning(options, warnings):
    words = "train --strategy agn --no-plot --data pyproject.toml --device cuda"

    assert warned(bare(*options, "--", *words.split()), warnings)


def test_gpus_that_are_not_used_are_a_warning():
    done = sbatch("--gpus-per-node", "2", "--", "train", "--strategy", "agn")

    assert warned(done, ["GPUs are requested, which the training does not use"])


def test_between_nodes_is_measured_where_there_are_several():
    for nodes, end in ("1", "step)"), ("2", "step wire)"):
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
        "must have letters, digits and . _ + - only, no - at first, got 'my job'",
    ),
    "name of an option": (["--name=-x", "--", "bench"], "no - at first, got '-x'"),
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
    "sweep and nodes": (
        ["--nodes", "8", "--sweep", "1,2", "--", "bench", "step"],
        "--nodes 8: with --sweep the job asks for 2, the largest of its numbers",
    ),
    "sweep of wire": (
        ["--sweep", "1,2", "--", "bench", "wire"],
        "bench wire needs at least 2 nodes",
    ),
    "wire": (["--", "bench", "wire"], "bench wire needs at least 2 nodes"),
    "one file of several runs": (
        ["--", "bench", "--plot", "x.png"],
        "bench --plot: several runs of this job would write that file",
    ),
    "one file of a sweep": (
        ["--sweep", "1,2", "--", "bench", "step", "--csv", "x.csv"],
        "bench --csv: several runs of this job would write that file",
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


# Instead of what SLURM has; the rest of PATH follows.
STUBS = {
    "srun": '#!/bin/bash\n[ "$1" = --nodes=1 ] || eval "$RANKS"',
    "scontrol": '#!/bin/bash\necho "scontrol $*"',
    "sleep": "#!/bin/bash",
    "python": "#!/bin/bash\necho MPICH",
}


@pytest.fixture
def executed(tmp_path, monkeypatch):
    """Run a script in a job whose ranks are a shell command; return its output."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STUBS.items():
        (folder / name).write_text(f"{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("JOB_NAME=mine", "JOB_ID=7", "CPUS_PER_TASK=1", "NTASKS=1"):
        monkeypatch.setenv(*f"SLURM_{name}".split("="))

    def run(text, ranks):
        monkeypatch.setenv("RANKS", ranks)
        command = ["bash", "-c", text]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_a_program_that_changes_its_directory_asks_to_be_queued_again(executed):
    text = sbatch("--", "./mine").stdout
    ranks = 'mkdir elsewhere; cd elsewhere; touch "$REQUEUE_FILE"; exit 3'

    assert "scontrol requeue 7\n" in executed(text, ranks).stdout


@pytest.mark.parametrize(
    ("array", "task"),
    # The last one; another one; submitted by a task of another array.
    [("7", "7_3"), ("6", "7"), ("9", "7")],
)
def test_of_a_job_array_one_task_is_queued_again(executed, monkeypatch, array, task):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", array)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    text = sbatch("--", "./mine").stdout

    assert f"scontrol requeue {task}\n" in executed(text, "touch $REQUEUE_FILE").stdout


SAVE = "mkdir -p $saved; touch $saved/checkpoint-1.safetensors"
OWN = "echo job 7, restart ${SLURM_RESTART_COUNT:-0} >$saved/.owner"
STOP = "echo 75 >$saved/status; exit 75"
# What the ranks do; a message, the exit status, and whether the job is queued again.
JOBS = {
    "stopped": (f"{SAVE}; {OWN}; {STOP}", "to continue from mine-7.saved", 0, True),
    "killed": (f"{SAVE}; {OWN}; exit 137", "to continue from mine-7.saved", 0, True),
    "complete": (f"{SAVE}; {OWN}; echo 0 >$saved/status; exit 1", "", 0, False),
    "nothing saved": (
        f"mkdir $saved; {OWN}; {STOP}",
        "nothing new was saved",
        75,
        False,
    ),
    "wrong options": ("exit 2", "nothing new was saved", 2, False),
    "another job": (
        f"{SAVE}; echo job 8, restart 0 >$saved/.owner; {STOP}",
        "another run saves to mine-7.saved, so the job is not queued again",
        75,
        False,
    ),
    "another start": (
        f"{SAVE}; echo job 7, restart 11 >$saved/.owner; exit 137",
        "another run saves to mine-7.saved",
        137,
        False,
    ),
}


@pytest.fixture(scope="module")
def training():
    return sbatch("--", "train", "--strategy", "agn").stdout


@pytest.mark.parametrize("restart", [None, "1"])
@pytest.mark.parametrize("case", JOBS)
def test_a_training_is_queued_again(training, case, restart, executed, monkeypatch):
    ranks, message, status, again = JOBS[case]
    if restart:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    done = executed(training, f"saved=mine-7.saved; {ranks}")

    assert ("scontrol requeue 7\n" in done.stdout) is again
    assert message in done.stderr
    assert done.returncode == status
