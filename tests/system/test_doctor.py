"""``hpcaccum doctor``: alone, as ranks of a job, and where something is broken."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys

import pytest
from mpi4py.MPI import get_vendor

from hpcaccum.launch.probes import KILLS, LOSS, PROBES

from ..programs import run_program
from .conftest import SURVIVE

pytestmark = pytest.mark.mpi

DOCTOR = "-m", "hpcaccum", "doctor"

SHORT = """
import sys
from hpcaccum.cli import main
from hpcaccum.launch import probes
probes._LARGE = 1 << 20
sys.exit(main(["doctor", *sys.argv[1:]]))
"""

# Without the probes between the first and the last one.
LOSES = SHORT.replace(
    "probes._LARGE = 1 << 20",
    "for name in [*probes.PROBES][1:-1]:\n    del probes.PROBES[name]",
)

# Starts jobs as asked, but for one probe.
BROKEN = """\
#!/bin/bash
case " $* " in
    *" --probe atomics "*) {what} ;;
    *" --probe launch "*) exec {mpiexec} -n 2 "$@" ;;
    *) exit 3 ;;
esac
"""


@pytest.fixture
def doctor(tmp_path, mpi_environment):
    """Run the doctor alone; return its exit status and what it shows."""

    def run(*options, **env):
        env |= mpi_environment
        command = [sys.executable, *DOCTOR, *map(str, options)]
        done = run_program(command, timeout=300, cwd=tmp_path, env=env)
        assert "Traceback (most recent call last)" not in done.stdout
        return done.returncode, done.stdout

    return run


@pytest.fixture
def launcher(tmp_path):
    """Write a program that starts jobs; return its path."""

    def write(text):
        path = tmp_path / "launcher"
        path.write_text(text)
        path.chmod(0o700)
        return path

    return write


def test_alone_it_starts_a_job_for_each_probe(doctor, mpiexec, tmp_path):
    options = "--launcher", f"{mpiexec} -n 2", "--json", "found.json"
    status, shown = doctor(*options)
    found = json.loads((tmp_path / "found.json").read_text())

    assert status == 0, shown
    assert [each["probe"] for each in found] == list(PROBES)
    assert {each["verdict"] for each in found} <= {"ok", "note"}
    assert "2 ranks on 1 node" in found[0]["text"]
    for each in found:
        assert re.search(f"^{each['verdict']} +{each['probe']} +", shown, re.M)
    assert "0 problems\n" in shown
    assert re.match(r"a rank was killed, and the job ended with st", found[-1]["text"])
    assert shlex.join(SURVIVE[get_vendor()[0]][0]) in found[-1]["advice"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_started_by_a_launcher_its_ranks_are_the_job(mpirun, script, tmp_path):
    # A message of 2 GiB takes more time than all else; the test above sends one.
    program = script(SHORT)
    done = mpirun(3, program, "--json", "found.json", cwd=tmp_path, status=0)
    found = json.loads((tmp_path / "found.json").read_text())

    # It kills a rank on request only.
    assert [each["probe"] for each in found] == list(PROBES)[:-1]
    assert done.stdout.count("0 problems\n") == 1
    assert re.search(r"3 ranks on .*; \S.* \S+; ranks: 3 on ", done.stdout)


@pytest.mark.parametrize("survive", [False, True])
def test_its_last_rank_is_killed(mpirun, script, tmp_path, survive):
    options = "--kill", "--json", "found.json"
    done = mpirun(3, script(LOSES), *options, cwd=tmp_path, survive=survive)
    _, *last = json.loads((tmp_path / "found.json").read_text())

    assert KILLS in done.stdout
    assert bool(last) == survive == ("0 problems\n" in done.stdout), done.stdout
    assert (" a rank was killed, and the others went on " in done.stdout) == survive


def test_alone_it_kills_a_rank_of_a_job(doctor, mpiexec, launcher):
    options, wrapper = SURVIVE[get_vendor()[0]]
    words = shlex.join([mpiexec, *options, "-n", "2", *wrapper])
    broken = BROKEN.format(what=f'exec {words} "$@"', mpiexec=mpiexec)
    _, shown = doctor("--launcher", launcher(broken.replace("atomics", LOSS)))

    assert "ok       lost rank   a rank was killed, and the others went on" in shown


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("echo oh; kill -SEGV $$", "the job ended with status -11"),
        ("sleep 60", "the job did not end within 11 s"),
    ],
)
def test_a_crash_or_a_hang_is_a_finding(doctor, mpiexec, launcher, what, text):
    broken = launcher(BROKEN.format(what=what, mpiexec=mpiexec))
    status, shown = doctor("--launcher", broken, "--timeout", "1")

    assert status == 1
    about = f"atomics     {text}; tried: Words that all ranks change at the same time"
    assert f"problem  {about}\n" in shown
    # It goes on with the next one.
    assert "problem  writers " in shown


def test_what_a_job_finds_is_shown_as_it_is(doctor, mpiexec, launcher):
    what = f'MPI4PY_RC_THREAD_LEVEL=serialized exec {mpiexec} -n 2 "$@"'
    broken = BROKEN.format(what=what, mpiexec=mpiexec)
    _, shown = doctor("--launcher", launcher(broken.replace("atomics", "threads")))

    assert "problem  threads     less than MPI_THREAD_MULTIPLE: opt" in shown
    assert "afterwards" not in shown


def test_an_error_of_open_mpi_that_is_none_is_a_note(doctor, mpiexec, launcher):
    what = f'echo "Error: OSC UCX component priority set"; exec {mpiexec} -n 2 "$@"'
    broken = BROKEN.format(what=what, mpiexec=mpiexec)
    _, shown = doctor("--launcher", launcher(broken.replace("atomics", "windows")))

    text = "32 accumulators at the same time; Open MPI prints 'OSC UCX component prio"
    assert f"note     windows     {text}" in shown
    assert "-> export OMPI_MCA_osc=^ucx" in shown


def test_a_job_that_fails_after_its_finding_is_a_problem(doctor, mpiexec, launcher):
    # As if MPI_Finalize had failed.
    failing = launcher(f'#!/bin/bash\n{mpiexec} -n 2 "$@"\nexit 5\n')
    status, shown = doctor("--launcher", failing)

    assert status == 1
    assert re.search("^problem  launch .* 2 ranks on 1 node", shown, re.MULTILINE)
    assert "; afterwards the job ended with status 5; tried: Ranks that are " in shown


@pytest.mark.parametrize(("signal", "status"), [("INT", 130), ("TERM", 143)])
def test_a_doctor_that_is_ended_leaves_nothing(
    doctor, launcher, tmp_path, signal, status
):
    lines = "#!/bin/sh", "echo $$ >started", f"sleep 0.5; kill -{signal} $PPID"
    found, shown = doctor("--launcher", launcher("\n".join([*lines, "sleep 99"])))

    assert found == status, shown
    assert {path.name for path in tmp_path.iterdir()} == {"launcher", "started"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "started").read_text()), 0)


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ("nonesuch", "launch      no program 'nonesuch' in PATH; tried: Ranks"),
        ("false", "the job ended with status 1"),
        ("env PMI_SIZE=2", "each is alone in its MPI_COMM_WORLD"),
        ("env", "only one rank"),
    ],
)
def test_ranks_that_do_not_find_each_other(doctor, launcher, text):
    status, shown = doctor("--launcher", launcher, "--timeout", "30")

    assert text in shown
    if launcher != "env":
        assert status == 1
        assert "1 problem\n" in shown
        assert "->" in shown


def test_the_cause_is_shown_before_the_epilogue(doctor, launcher):
    cause = "PMI(7):  Runtime environment uses unsupported PMI version PMIx. Aborting."
    epilogue = "".join(f"echo epilogue {number}\n" for number in range(9))
    text = f"#!/bin/bash\necho start\necho '{cause}'\n{epilogue}exit 16\n"
    status, shown = doctor("--launcher", launcher(text))

    assert status == 1
    lines = [line.strip() for line in shown.splitlines()]
    first = lines.index(cause)
    assert lines[first - 1].endswith(
        "launch      the job ended with status 16; tried: "
        "Ranks that are started together and find each other"
    )
    assert lines[first + 1 : first + 6] == [
        f"epilogue {number}" for number in range(4, 9)
    ]
    assert lines[first + 6].startswith("-> ranks of MPICH need the mpiexec of MPICH")


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        (
            "= PID 12 RUNNING AT h2\n= EXIT CODE: 7\n",
            "-> is /dev/shm of that node",
        ),
        ("srun: error: n2: task 1: Bus error\n", "-> is /dev/shm of that node"),
        ("UCX  ERROR connect(dest_addr=10.0.0.3:5) failed\n", "-> can all nodes reach"),
        ("[h2] An error occurred in Socket closed\n", "-> can all nodes reach each"),
        ("\0\nsleep", "-> can all nodes reach each other?"),
    ],
)
def test_the_nodes_of_a_job_that_does_not_start_get_advice(
    doctor, launcher, tmp_path, lines, advice
):
    (tmp_path / "printed").write_text(
        lines + "".join(f"epilogue {number}\n" for number in range(9))
    )
    wait = "if grep -q sleep printed; then sleep 60; fi"
    text = f"#!/bin/bash\ncat printed\n{wait}\nexit 1\n"
    status, shown = doctor("--launcher", launcher(text), "--timeout", "1")

    assert status == 1
    assert advice in shown
    assert "does the launcher belong to it" not in shown
    assert "\0" not in shown
    assert ("RUNNING AT h2" in shown) == ("RUNNING AT h2" in lines)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--timeout", "0", "--timeout: must be more than 0, got '0'"),
        ("--timeout", "inf", "--timeout: must be more than 0, got 'inf'"),
        ("--launcher", "'mpiexec", "--launcher 'mpiexec: No closing quotation"),
        ("--launcher", " ", "--launcher must name a command"),
    ],
)
def test_a_wrong_option_is_named(doctor, option, value, text):
    status, shown = doctor(option, value)

    assert status == 2
    assert text in shown
