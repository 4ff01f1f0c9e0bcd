"""The text of a batch script for SLURM, made of a few paragraphs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

# Seconds before the end of the time limit at which the ranks are asked to stop. SLURM
# may be up to 60 s early.
MARGIN = 120

_USE = """\
#
#   source ~/venv/bin/activate           # where hpcaccum is installed; module load ...
#   sbatch FILE
#   sbatch {example}
#
# Options before the file are those of sbatch, words after it are added to the program.
# All nodes must see this directory and the environment of the program."""

_ABOUT_TRAIN = f"""\
#
# {MARGIN} s before the time limit, the ranks write a checkpoint and the job is queued
# again. It then continues, as it does after SLURM has queued it again because a node
# failed or a job of higher priority took its place. It is not queued again when the
# training is complete, has failed, or was cancelled, nor if nothing new was saved, or
# if another run has begun to save to the same directory.
# To continue in another job:  CHECKPOINTS=DIRECTORY sbatch FILE
#
# Writes, here: {{name}}-JOB.out (progress and table),{{picture}}
# -JOB.jsonl (log; -JOB.1.jsonl after the first restart), -JOB.saved (checkpoints)."""

_ABOUT_BENCH = """\
#
# Writes, here: {name}-JOB.out (the table) and {name}-JOB.jsonl.
# What became slower:       hpcaccum bench compare OLD.jsonl NEW.jsonl"""

_ABOUT_ARRAY = """\
#
# One benchmark is one task of an array:  sbatch --array=1,3 FILE
#
# Writes, here, for each task: {name}-JOB_TASK.out (the table) and
# {name}-JOB-BENCHMARK.jsonl.
# What became slower:       hpcaccum bench compare OLD.jsonl NEW.jsonl"""

_ABOUT_SWEEP = """\
#
# Measures on {counts}, one after the other, and reports how the times grow.
# A job with fewer nodes leaves out the larger numbers.
#
# Writes, here: {name}-JOB.out (tables and report), -JOB.png (the picture) and, for each
# number of nodes, {name}-JOB-NODES.jsonl."""

_ABOUT_OTHER = f"""\
#
# {MARGIN} s before the time limit, the ranks get SIGUSR1. If the program then saves its
# state and creates the file that $REQUEUE_FILE names, the job is queued again. (Its
# status is no sign: a launcher may kill the ranks that end last, and report that.)"""

_PLUGIN = """\
# How srun must start the ranks: pmix for Open MPI, pmi2 for MPICH and derivatives
# (`srun --mpi=list`: what your SLURM has). With the wrong one each rank is alone, and
# hpcaccum ends with an error. SLURM_MPI_TYPE=... sbatch ... overrides this.
library=$(python -m mpi4py --mpi-lib-version | tr -d '\\0')
case $library in
    "Open MPI"*) mpi=pmix ;;
    *) mpi=pmi2 ;;
esac
"""

_SETTINGS = """\
# The program gets the environment of this script, also if sbatch passed it none.
export SLURM_EXPORT_ENV=ALL
# As many threads as a rank has cores.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# Seconds; a longer wait for other ranks ends the job and names the missing ranks.
export HPCACCUM_TIMEOUT={timeout}
export PYTHONUNBUFFERED=1
"""

_INTERFACE = """\
# Open MPI between nodes without a fast network: name the interface that joins them.
# export OMPI_MCA_btl_tcp_if_include=eth0
"""

# Since SLURM 22.05 srun does not take --cpus-per-task from the job.
_SRUN = """\
srun {size}--mpi="${{SLURM_MPI_TYPE:-$mpi}}" --kill-on-bad-exit=1 \\
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores \\
"""
_SIZE = """\
--nodes="$nodes" --ntasks="$((nodes * SLURM_NTASKS_PER_NODE))" \\
    """
_MPIEXEC = """\
mpiexec -n "$SLURM_NTASKS" "${place[@]}" \\
"""

_WAIT = """\
launcher=$!
# SLURM sends the signal to this script only, and it ends a wait.
trap 'kill -USR1 "$launcher"' USR1
status=0
wait "$launcher" || status=$?
while kill -0 "$launcher" 2>/dev/null; do
    status=0
    wait "$launcher" || status=$?
done
"""

_PLACE = """\
# How many ranks mpiexec starts on each node.
library=$(python -m mpi4py --mpi-lib-version | tr -d '\\0')
case $library in
    "Open MPI"*) place=(--map-by "ppr:$SLURM_NTASKS_PER_NODE:node") ;;
    *) place=(-ppn "$SLURM_NTASKS_PER_NODE") ;;
esac
"""

_STEPS = """\
# Steps of a job that was queued again have the old numbers, by which MPICH names its
# shared memory. What a killed run left there would be in the way: take the next number.
for ((step = 0; step < ${SLURM_RESTART_COUNT:-0}; step++)); do
    srun --nodes=1 --ntasks=1 true
done
"""

_TASK = """\
# What is queued again. The last task of a job array has the number of the array.
task=$SLURM_JOB_ID
[ "$task" != "${SLURM_ARRAY_JOB_ID:-}" ] || task+=_$SLURM_ARRAY_TASK_ID
"""

_BEFORE_TRAIN = """\
name=$SLURM_JOB_NAME-$SLURM_JOB_ID
log=$name${SLURM_RESTART_COUNT:+.$SLURM_RESTART_COUNT}.jsonl
saved=${CHECKPOINTS:-$name.saved}

newest() {
    find "$saved" -name '.unfinished*' -prune -o \\
        -name '*.safetensors' -printf '%T@ %p\\n' 2>/dev/null | sort -n | tail -n 1
}
before=$(newest)
rm -f "$saved/status"

# Whether the ranks of this run are the last ones that began to save there.
owned() {
    grep -qsxF "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}" "$saved/.owner"
}
"""

_AFTER_TRAIN = """\
# What counts is what the ranks wrote, not the status of the launcher: that of a job
# whose node failed may be 0. Without this file, the ranks did not end in order.
if owned && [ -e "$saved/status" ]; then
    status=$(cat "$saved/status")
    [ "$status" -eq 75 ] || exit "$status"
fi
if [ "$(newest)" = "$before" ]; then
    echo "{name}: nothing new was saved, so the job is not queued again" >&2
    exit $((status ? status : 1))
fi
if ! owned; then
    echo "{name}: another run saves to $saved, so the job is not queued again" >&2
    exit $((status ? status : 1))
fi
echo "{name}: the job is queued again, to continue from $saved" >&2
scontrol requeue "$task" || exit 75
# SLURM ends this script; its own exit could be taken for that of the next run.
sleep 60
"""

_BEFORE_OTHER = """\
# For a program that changes its directory, too.
export REQUEUE_FILE=$PWD/$SLURM_JOB_NAME-$SLURM_JOB_ID.requeue
rm -f "$REQUEUE_FILE"
"""

_AFTER_OTHER = """\
if [ -e "$REQUEUE_FILE" ]; then
    # SLURM ends this script; its own exit could be taken for that of the next run.
    scontrol requeue "$task" && sleep 60
fi
exit "$status"
"""


@dataclass(frozen=True)
class Job:
    """What a batch script starts.

    Attributes:
        call: The words of the command that writes the script, for its first line.
        words: The program and its arguments.
        name: Of the job.
        nodes, ranks_per_node, cpus_per_rank, gpus_per_node: What it asks for.
        time: The limit, as sbatch reads it.
        launcher: "srun" or "mpiexec".
        setup: Shell commands before the program.
        options: More options of sbatch.
        benchmarks: One for each task of an array; else empty.
        sweep: Numbers of nodes to measure on, one after the other; else empty.
    """

    call: tuple[str, ...]
    words: tuple[str, ...]
    name: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    gpus_per_node: int
    time: str
    launcher: str
    setup: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    benchmarks: tuple[str, ...] = ()
    sweep: tuple[int, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the program is ``hpcaccum train``, which can be continued."""
        return self.words[0] == "train"

    @property
    def plots(self) -> bool:
        """Whether a training is to draw a picture."""
        return "--no-plot" not in self.words

    @property
    def measures(self) -> bool:
        """Whether the program is ``hpcaccum bench``."""
        return self.words[0] == "bench"


def script(job: Job) -> str:
    """Return the text of the batch script."""
    paragraphs = [_head(job), _directives(job)]
    if job.setup:
        # Scripts of modules use variables that are not set.
        paragraphs.append("".join(f"{each}\n" for each in job.setup))
    paragraphs.append("set -uo pipefail\n")
    if job.launcher == "srun":
        paragraphs.append(_PLUGIN)
        if not job.measures:
            paragraphs.append(_STEPS)
    else:
        paragraphs.append(_PLACE)
    paragraphs.append(_SETTINGS.format(timeout=120 if job.measures else 600))
    if job.nodes > 1 and job.launcher == "srun":
        paragraphs.append(_INTERFACE)
    if not job.measures:
        paragraphs.append(_TASK)
    paragraphs.append(_body(job))
    return "\n".join(paragraphs)


def _head(job: Job) -> str:
    """Return the comments at the top: how to use the script and what it does."""
    call = shlex.join(("hpcaccum", "sbatch", *job.call))
    about, example = _ABOUT_OTHER, "--nodes=4 FILE"
    if job.trains:
        about, example = _ABOUT_TRAIN, "--time=8:00:00 FILE --epochs 500"
    elif job.measures:
        about, example = _ABOUT_BENCH, "FILE --sizes 1M 64M --seconds 10"
        if job.sweep:
            about = _ABOUT_SWEEP
        elif job.benchmarks:
            about = _ABOUT_ARRAY
    counts = ", ".join(map(str, job.sweep))
    counts += " node" if job.sweep == (1,) else " nodes"
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by: {call}",
            _USE.format(example=example),
            about.format(
                name=job.name,
                counts=counts,
                picture=" -JOB.png (picture)," if job.plots else "",
            ),
            "",
        ]
    )


def _directives(job: Job) -> str:
    """Return the options of sbatch."""
    array = bool(job.benchmarks)
    lines = [
        f"job-name={job.name}",
        f"nodes={job.nodes}",
        f"ntasks-per-node={job.ranks_per_node}",
        f"cpus-per-task={job.cpus_per_rank}",
        f"time={job.time}",
        f"output=%x-{'%A_%a' if array else '%j'}.out",
    ]
    if job.gpus_per_node:
        lines.append(f"gpus-per-node={job.gpus_per_node}")
    if array:
        lines.append(f"array=0-{len(job.benchmarks) - 1}")
    if job.measures:
        lines.append("exclusive")
    else:
        target = "" if job.launcher == "srun" else "B:"
        lines += [f"signal={target}USR1@{MARGIN}", "requeue", "open-mode=append"]
    words = [*(f"--{each}" for each in lines), *map(_option, job.options)]
    return "".join(f"#SBATCH {each}\n" for each in words)


def _option(option: str) -> str:
    """Return an option of sbatch whose value is one word."""
    name, equals, value = option.partition("=")
    if not (name.startswith("--") and any(map(str.isspace, value))):
        return option
    return f"{name}{equals}{shlex.quote(value)}"


def _body(job: Job) -> str:
    """Return what runs the program, and what follows it."""
    if job.trains:
        files = '--save "$saved" --resume --log "$log"'
        files += ' --plot "$name.png"' if job.plots else ""
        return (
            f"{_BEFORE_TRAIN}\n{_run(job, job.words, files)}\n"
            f"{_AFTER_TRAIN.format(name=job.name)}"
        )
    if job.sweep:
        return _sweep(job)
    if job.measures:
        return _bench(job)
    return f"{_BEFORE_OTHER}\n{_run(job, job.words)}\n{_AFTER_OTHER}"


def _bench(job: Job) -> str:
    # The job may be queued again, and the files of its first run are then in the way.
    json = '--json "$name.jsonl" --force'
    if not job.benchmarks:
        name = "name=$SLURM_JOB_NAME-$SLURM_JOB_ID\n"
        return f"{name}\n{_run(job, job.words, json)}\nexit $status\n"
    array = f"benchmarks=({' '.join(job.benchmarks)})\n"
    words = ("bench", "$benchmark", *job.words[1:])
    name = (
        "benchmark=${benchmarks[SLURM_ARRAY_TASK_ID]}\n"
        "name=$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID-$benchmark\n"
    )
    return f"{array}{name}\n{_run(job, words, json)}\nexit $status\n"


def _sweep(job: Job) -> str:
    run = _run(job, job.words, '--json "$name-$nodes.jsonl" --force', sweep=True)
    inner = "".join(f"    {line}\n" for line in run.splitlines())
    return f"""\
name=$SLURM_JOB_NAME-$SLURM_JOB_ID

files=()
for nodes in {" ".join(map(str, job.sweep))}; do
    [ "$nodes" -le "$SLURM_NNODES" ] || break
    echo "===== nodes: $nodes"
{inner}    [ "$status" -eq 0 ] || exit "$status"
    files+=("$name-$nodes.jsonl")
done

python -m hpcaccum bench scaling "${{files[@]}}" --plot "$name.png" --force
"""


def _run(job: Job, words: tuple[str, ...], files: str = "", sweep: bool = False) -> str:
    """Return the lines that run a program and set ``status``."""
    if job.trains or job.measures:
        words = ("python", "-m", "hpcaccum", *words)
    lines = " \\\n    ".join(
        part for part in (_quoted(words), f'{files} "$@"'.strip()) if part
    )
    if job.launcher == "mpiexec":
        return f"{_MPIEXEC}    {lines} &\n{_WAIT}"
    size = _SIZE if sweep else ""
    return f"status=0\n{_SRUN.format(size=size)}    {lines} || status=$?\n"


def _quoted(words: tuple[str, ...]) -> str:
    """Return words for the shell; the variable of an array as such."""
    variable = "$benchmark"
    return " ".join(f'"{w}"' if w == variable else shlex.quote(w) for w in words)
