"""The accumulator's protocol, searched exhaustively: tests/model/accumulator.pml."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import REPOSITORY

MODEL = REPOSITORY / "tests" / "model" / "accumulator.pml"

# Where the macros leave a number open it is 3 writers with 1 gradient each, and 2
# takers with 1 take each. The largest has 6 million states: 0.8 GB, 10 s.
CONFIGURATIONS = {
    "rounds": "GRADS=2 TAKES=2",
    "timeouts": "GRADS=2 TIMEOUTS",
    "timeouts, two takes each": "TAKES=2 TIMEOUTS",
    "every access": "FINE TIMEOUTS",
    "every access, two gradients each": "WRITERS=2 GRADS=2 FINE TIMEOUTS",
    "stale gradients": "GRADS=2 STALE",
    "the step is set": "TAKES=2 STALE SETTER",
    "the step is set, every access": "WRITERS=2 STALE SETTER FINE",
    "a long line": "WRITERS=1 GRADS=2 TAKERS=3 TAKES=2 TIMEOUTS",
    "counting": "WRITERS=2 OBSERVER TIMEOUTS",
    "writers leave": "TAKES=2 LEAVE",
    "writers leave, timeouts": "GRADS=2 WRITERS=2 LEAVE TIMEOUTS FINE",
    "what a writer knows": "WRITERS=2 GRADS=3 TAKES=2 KNOWN",
    "giving up": "TAKES=2 GIVE_UP",
    "giving up, timeouts": "WRITERS=2 GRADS=2 GIVE_UP TIMEOUTS",
    "giving up, every access": "WRITERS=2 GIVE_UP FINE TIMEOUTS",
}

# What the search must have reached, or it proves nothing; by macro.
HAPPENINGS = {
    "": {"a writer closes the round", "a take gets more than it wants"},
    "GRADS": {"a gradient joins another"},
    "STALE": {"a gradient is dropped"},
    "LEAVE": {"a quorum shrinks", "a round is closed while its take gives up"},
    "GIVE_UP": {
        "a gradient is withdrawn",
        "a gradient is given up",
        "a round comes to nothing",
    },
    "KNOWN": {"a writer knows", "a writer does not know"},
    "TIMEOUTS": {
        "a take gives up in line",
        "a take gives up for want of gradients",
        "a take gives up after closing",
        "a round is closed while its take gives up",
        "the caller fails",
        "a closed round is resumed",
    },
}

# The bug, where to look for it, and the assertion that must fail.
BUGS = {
    "LEAVE_EARLY": ("WRITERS=2 GRADS=2 FINE", "found&payload"),
    "DONE_EARLY": ("WRITERS=2", "sum[1]==admitted[p]"),
    "NO_DRAWING_WAIT": ("WRITERS=2", "head==0"),
    "BLIND_GIVE_UP": ("WRITERS=2 FINE TIMEOUTS", "(STATE>>6)==step_now"),
    "NOT_ON_RECORD": ("WRITERS=2 TIMEOUTS", "CLOSED=="),
    "ANY_BUFFER": ("WRITERS=2 GRADS=2", "read_now[1]"),
    "STALE_ADMITTED": ("WRITERS=2 GRADS=2 FINE STALE", "local_step>=step_now"),
    "OLD_KNOWLEDGE": ("WRITERS=2 GRADS=2 TAKES=2", "(STATE&15)>0"),
    "WANT_ONCE": ("WRITERS=2 TAKES=2 OBSERVER TIMEOUTS", "==truth"),
    "WITHDRAW_BLIND": ("WRITERS=2 GIVE_UP FINE", "(STATE>>6)==step_now"),
    "NOT_SAID": ("WRITERS=2 GIVE_UP", "(STATE&15)>0"),
    "LEFT_LATE": ("WRITERS=2 LEAVE", "!(nobody)||(tally[open_now]==0)"),
}


@pytest.fixture(scope="module")
def search(request, tmp_path_factory):
    """Search all states of the model with these macros; return what Spin prints.

    All searches start at once, as many at a time as there are cores.
    """
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        message = f"no {' and no '.join(missing)}: apt-get install {' '.join(missing)}"
        required = os.environ.get("HPCACCUM_REQUIRE_SPIN") == "1"
        (pytest.fail if required else pytest.skip)(message)

    def run(macros: str) -> str:
        folder = tmp_path_factory.mktemp("model")
        defines = [f"-D{macro}" for macro in macros.split()]
        output = ""
        for command in (
            ["spin", *defines, "-a", MODEL],
            ["gcc", _optimization(macros), "-w", "-DSAFETY", "-o", "pan", "pan.c"],
            # Depth, far more than needed; hash slots to begin with, as a power of 2.
            ["./pan", "-m100000", "-w22"],
        ):
            output = _output(command, folder)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = {macros: pool.submit(run, macros) for macros in _wanted(request)}
        yield lambda macros: begun[macros].result()
        pool.shutdown(cancel_futures=True)


def _optimization(macros: str) -> str:
    # Nearly every bug is found within moments: to optimize would take longer. -O2 and
    # -DCOLLAPSE (less memory) take longer than they save.
    return "-O0" if "BUG_" in macros else "-O1"


def _wanted(request: pytest.FixtureRequest) -> list[str]:
    """Return the macros of the selected tests, in their order."""
    wanted = []
    for item in request.session.items:
        if item.path == request.path:
            chosen = getattr(item, "callspec", None)
            wanted += [_macros(**chosen.params)] if chosen else []
    return wanted


def _macros(name: str = "", bug: str = "") -> str:
    return f"{BUGS[bug][0]} BUG_{bug}" if bug else CONFIGURATIONS[name]


def _output(command: list[str | Path], folder: Path) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_protocol_has_no_error(search, name):
    macros = CONFIGURATIONS[name]

    output = search(macros)

    assert ", errors: 0\n" in output
    assert_complete(output)
    names = {"", *(macro.partition("=")[0] for macro in macros.split())}
    expected = set().union(*(HAPPENINGS.get(name, set()) for name in names))
    assert set(re.findall(r"^happens: (.*)$", output, re.MULTILINE)) >= expected


def assert_complete(output: str) -> None:
    for flaw in ("not completed", "max search depth too small", "out of memory"):
        assert flaw not in output
    assert "Full statespace search" in output
    assert re.search(r"invalid end states\s+\+", output)
    unreached = re.findall(r"^unreached in (.*)\n\s+(.*)$", output, re.MULTILINE)
    assert {who for who, _ in unreached} >= {"proctype Writer", "proctype Taker"}
    for who, what in unreached:
        assert what.startswith("(0 of "), f"{who} never reaches {what}"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(search, bug):
    _, assertion = BUGS[bug]

    output = search(_macros(bug=bug))

    assert re.search(r"errors: [1-9]", output)
    violated = re.search(r"^pan:1: assertion violated (.*) \(at", output, re.MULTILINE)
    assert violated, output
    assert assertion in violated[1]


def test_all_bugs_and_happenings_of_the_model_are_looked_for():
    text = MODEL.read_text()

    assert set(re.findall(r"BUG_([A-Z_]+)", text)) == set(BUGS)
    known = set().union(*HAPPENINGS.values())
    assert set(re.findall(r"HAPPENS\((a .*?|the .*?)\)", text)) == known
