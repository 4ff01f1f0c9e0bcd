"""The protocols of tests/model, searched exhaustively."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from .conftest import REPOSITORY

FOLDER = REPOSITORY / "tests" / "model"


class Model(NamedTuple):
    """What is searched, and what must be found.

    Attributes:
        configurations: Name to macros.
        happenings: By macro, what a search must have reached, or it proves nothing.
        bugs: Name to where to look for it, and the assertion that must fail.
        processes: Those that must run to their end.
    """

    configurations: dict[str, str]
    happenings: dict[str, set[str]]
    bugs: dict[str, tuple[str, str]]
    processes: set[str]


# Where the macros leave a number open it is 3 writers with 1 gradient each, and 2
# takers with 1 take each. The largest has 6 million states: 0.8 GB, 10 s.
ACCUMULATOR = Model(
    configurations={
        "rounds": "GRADS=2 TAKES=2",
        "timeouts": "GRADS=2 TIMEOUTS",
        "timeouts, two takes each": "TAKES=2 TIMEOUTS",
        "every access": "FINE TIMEOUTS",
        "every access, two gradients each": "WRITERS=2 GRADS=2 FINE TIMEOUTS",
        "stale gradients": "GRADS=2 STALE",
        "late gradients": "GRADS=3 WRITERS=2 TAKES=2 STALE LATE",
        "the step is set": "TAKES=2 STALE SETTER",
        "the step is set, every access": "WRITERS=2 STALE SETTER FINE",
        "a long line": "WRITERS=1 GRADS=2 TAKERS=3 TAKES=2 TIMEOUTS",
        "counting": "WRITERS=2 OBSERVER TIMEOUTS",
        "writers leave": "TAKES=2 LEAVE",
        "writers leave, timeouts": "GRADS=2 WRITERS=2 LEAVE TIMEOUTS FINE",
        "what a writer knows": "WRITERS=2 GRADS=3 TAKES=2 KNOWN",
        "lost writers": "WRITERS=2 GRADS=2 LEAVE CRASH",
        "lost writers, timeouts": "WRITERS=2 LEAVE CRASH TIMEOUTS",
        "lost writers and takers": "WRITERS=2 LEAVE CRASH TAKER_CRASH FINE",
        "many lost writers": "LEAVE CRASH",
    },
    happenings={
        "": {"a writer closes the round", "a take gets more than it wants"},
        "GRADS": {"a gradient joins another"},
        "STALE": {"a gradient is dropped"},
        "LATE": {"a late gradient is admitted"},
        "LEAVE": {"a quorum shrinks", "a round is closed while its take gives up"},
        "CRASH": {
            "a swap fails",
            "a writer dies before it is admitted",
            "a writer dies while it writes",
            "a writer dies when it has written",
            "a gradient is lost",
            "a round comes to nothing",
        },
        "WRITERS=2 GRADS=2 LEAVE CRASH": {"a writer dies while it adds"},
        "TAKER_CRASH": {
            "a taker is lost",
            "a request of a lost taker is withdrawn",
            "a closed round is resumed",
            "a take of a lost taker is completed",
        },
        "KNOWN": {"a writer takes a buffer for used"},
        "TIMEOUTS": {
            "a take gives up in line",
            "a take gives up for want of gradients",
            "a take goes on with what there is",
            "a take gives up after closing",
            "a round is closed while its take gives up",
            "the caller fails",
            "a closed round is resumed",
        },
    },
    bugs={
        "LEAVE_EARLY": ("WRITERS=2 GRADS=2 FINE", "LINE[rank]==0"),
        "DONE_EARLY": ("WRITERS=2", "sum[1]==admitted[p]"),
        "WEIGHT_LATE": ("WRITERS=2", "weight==admitted[p]"),
        "NO_DRAWING_WAIT": ("WRITERS=2", "head==0"),
        "BLIND_GIVE_UP": ("WRITERS=2 FINE TIMEOUTS", "(STATE>>6)==step_now"),
        "NOT_ON_RECORD": ("WRITERS=2 TIMEOUTS", "CLOSED=="),
        "ANY_BUFFER": ("WRITERS=2 GRADS=2", "read_now[1]"),
        "STALE_ADMITTED": ("WRITERS=2 GRADS=2 FINE STALE", "(local_step+0)>=step_now"),
        "OLD_KNOWLEDGE": ("WRITERS=2 GRADS=2 TAKES=2", "(STATE&15)>0"),
        "WANT_ONCE": ("WRITERS=2 TAKES=2 OBSERVER TIMEOUTS", "==truth"),
        "LATE_INTENT": ("WRITERS=2 LEAVE CRASH", "sum[0]==admitted[p]"),
        "KEPT_INTENT": ("WRITERS=2 TAKES=2 LEAVE CRASH", "sum[0]==admitted[p]"),
        "EARLY_READ": ("WRITERS=2 LEAVE CRASH", "total==lost_in[p]"),
        "LIVING_MISSING": ("WRITERS=2 LEAVE CRASH", "sum[0]==admitted[p]"),
        "NOT_MARKED": ("WRITERS=2 GRADS=2 LEAVE CRASH", "found==admitted[open_now]"),
        "DIVISOR": ("WRITERS=2 LEAVE CRASH", "number-lost_in[p]"),
        "RESUMED_TWICE": (
            "WRITERS=2 LEAVE CRASH TAKER_CRASH FINE",
            "number==tally[p]",
        ),
        "LOST_MEANWHILE": ("WRITERS=2 LEAVE CRASH TAKER_CRASH FINE", "head==0"),
        "LEFT_LATE": ("WRITERS=2 LEAVE", "!(nobody)||(tally[open_now]==0)"),
    },
    processes={"Writer", "Taker"},
)

# Here it is 2 ranks on 2 nodes, with 1 gradient each.
UPDATES = Model(
    configurations={
        "two nodes": "GRADS=2 LAG=1",
        "three ranks": "RANKS=3 LOCALS=3 REMOTES=0 LAG=1",
        "one node, every access": "LOCALS=2 REMOTES=0 GRADS=2 LAG=1 FINE TORN",
        "two nodes, every access": "LAG=0 FINE TORN",
        "late gradients": "LOCALS=2 REMOTES=0 GRADS=2 LATE",
        "lost ranks": "LOCALS=2 REMOTES=0 GRADS=2 LAG=1 TORN CRASH",
        "lost ranks, two nodes": "LAG=0 TORN CRASH",
        "waits in vain": "LOCALS=0 VERSIONS=2 HOPE TIMEOUTS",
        "waits in vain, every access": "LOCALS=0 VERSIONS=2 GRADS=0 TORN HOPE TIMEOUTS",
        "many versions, every access": "RANKS=1 LOCALS=0 VERSIONS=3 TORN",
        "three nodes, every access": "LOCALS=0 REMOTES=2 VERSIONS=2 GRADS=0 TORN",
        "unasked": "LOCALS=0 VERSIONS=2 PUSH TIMEOUTS",
        "unasked, every access": "LOCALS=0 VERSIONS=2 GRADS=0 TORN PUSH",
    },
    happenings={
        "LAG": {"a gradient is dropped"},
        "FINE": {"a swap fails", "a copy is overtaken"},
        "LATE": {"a late gradient is discounted"},
        "CRASH": {
            "a swap fails",
            "a rank dies before it is admitted",
            "a rank dies when it is admitted",
            "a rank dies when its gradient is there",
            "an empty update",
        },
        "VERSIONS": {"a newer step comes"},
        "VERSIONS=3": {"a snapshot is overtaken"},
        "HOPE": {
            "a rank gives up",
            "a step was asked for before",
            "a step was promised before",
            "an older step comes",
        },
        "PUSH": {"a step was promised before"},
        "LOCALS=0 VERSIONS=2 GRADS=0 TORN PUSH": {"a step was sent before"},
        "LOCALS=0 VERSIONS=2 PUSH TIMEOUTS": {
            "the root and its agent have sent a step",
            "an older step than a node wants",
        },
    },
    bugs={
        "APPLIED_EARLY": ("GRADS=2", "first==order[step]"),
        "SLOT_REUSED": ("GRADS=2", "<=APPLIED"),
        "TOO_FEW_PLACES": ("", "<=APPLIED"),
        "FACTOR_LATE": ("LOCALS=2 REMOTES=0 GRADS=2 LATE", "==lag_of[step]"),
        "CHECK_APART": ("FINE LAG=0", "(step_now-local_step)<=0"),
        "HOLDS_LATE": ("RANKS=1 VERSIONS=3 TORN", "first==local_step"),
        "UNCHECKED": ("RANKS=1 VERSIONS=3 TORN", "first==local_step"),
        "PUBLISHED_LATE": ("RANKS=1 VERSIONS=2 TORN", "local_step<=PUBLISHED"),
        "LATE_INTENT": ("LOCALS=2 REMOTES=0 LAG=0 CRASH", "!(order[step])"),
        "LIVING_MISSING": ("LOCALS=2 REMOTES=0 CRASH", "!(order[step])"),
        "EARLY_LOOK": ("LOCALS=2 REMOTES=0 CRASH", "!(order[step])"),
        "SENT_UNCHECKED": (
            "LOCALS=0 VERSIONS=2 GRADS=0 TORN PUSH",
            "snapshot[mine]>sent_now[node]",
        ),
        "SEND_TOGETHER": ("LOCALS=0 VERSIONS=2 TORN", "mine<1"),
        "USERS_UNCHECKED": ("LOCALS=0 REMOTES=2 VERSIONS=2 TORN", "value==step"),
        "RECEIVE_TOGETHER": (
            "LOCALS=0 VERSIONS=2 GRADS=0 TORN PUSH",
            "(newest[node]>>1)<step",
        ),
        "WANT_FORGOTTEN": ("RANKS=1 LOCALS=0 VERSIONS=2", "LEFT=="),
        "LEAST_WANT": ("LOCALS=0 VERSIONS=2 PUSH TIMEOUTS", "!((waiting[node]&"),
        "WANT_DROPPED": ("LOCALS=0 VERSIONS=2 PUSH", "LEFT=="),
        "NOT_ASKED_AGAIN": ("LOCALS=0 VERSIONS=2", "LEFT=="),
    },
    processes={"Root", "Rank"},
)

# Here it is 2 nodes, each with a rank that gives gradients. With "READERS=1" there is
# one that only reads, with "READERS=2" one on each node; 1 where nothing is given.
READ = {"a want for what is on its way", "a step that is there when it is asked for"}
SERVERS = Model(
    configurations={
        "two rounds": "READERS=1",
        "one round, waits in vain": "READERS=1 STEPS=2 HOPE TIMEOUTS",
        "single gradients": "READERS=1 SINGLE STEPS=2",
        "two updates at a time": "READERS=0 SINGLE BUFFERS=2",
        "two updates at a time, of one node": "READERS=0 SINGLE BUFFERS=2 PAIR STEPS=4",
        "two rounds, two ranks on each node": "READERS=2",
    },
    happenings={
        "": {
            "a want that comes after the order",
            "a want that comes before the root begins",
        },
        "READERS=1": READ,
        "READERS=2": READ,
        "HOPE": {"a wait that is given up"},
        "BUFFERS": {"a step that is ordered ahead"},
    },
    bugs={
        "BEGIN_FORGETS": ("STEPS=2", "root_done"),
        "WANT_FORGOTTEN": ("SINGLE STEPS=2", "root_done"),
        "SENT_TWICE": ("STEPS=2", "sent[from]<ordered"),
        "LATER_FIRST": ("SINGLE STEPS=2 HOPE", "]<=least"),
        "NO_SNAPSHOT": ("SINGLE", "value==step"),
        "COMPLETE_EARLY": ("STEPS=2", "==version[node]"),
        "NOT_ASKED_AGAIN": ("SINGLE", "done=="),
        "SLOT_REUSED": ("", "value==step"),
        "GIVE_TOGETHER": ("READERS=0 SINGLE BUFFERS=2 PAIR", "value==step"),
        "COLLECT_TOGETHER": ("READERS=0 SINGLE BUFFERS=2 PAIR", "value==step"),
        "BUFFER_REUSED": ("READERS=0 SINGLE PAIR", "!(buffer["),
    },
    processes={"Root", "Giver"},
)

NODE_UPDATE = Model(
    configurations={"a helper": "UPDATES=3", "two helpers": "HELPERS=2"},
    happenings={
        "": {
            "a lost rank has done a piece",
            "a chunk is made again",
            "a piece was not begun",
        }
    },
    bugs={
        "NOT_SAVED": ("", "slot[((piece*2)+i)]=="),
        "ONE_ROOM": ("", "slot[((piece*2)+i)]=="),
        "BUSY_EARLY": ("", "invalid array index"),
        "BUSY_LATE": ("", "invalid array index"),
        "OLD_NUMBER": ("", "center[i]==number"),
    },
    processes={"Root", "Worker"},
)

REDUCTION = Model(
    configurations={
        "two synchronizations": "RANKS=3",
        "two synchronizations, two ranks": "RANKS=2 CALLS=3",
        "one synchronization": "ONE_SHOT CALLS=3",
    },
    happenings={
        "": {
            "an input of a rank that has died counts",
            "an input of a rank that has died is left out",
        },
        "RANKS": {"a rank stands in for another"},
        "RANKS=3": {"a rank stands in for one that stood in"},
    },
    bugs={
        "LOST_NOT_COUNTED": ("", "counted[call]==(128|set)"),
        "EARLY_LOOK": ("ONE_SHOT", "counted[call]==(128|set)"),
        "TAKEN_FOR_DEAD": ("", "stripe[part]=="),
        "DIVISOR": ("ONE_SHOT", "number==size[call]"),
        "NOBODY_STANDS_IN": ("", "finished==3"),
        "ALL_STAND_IN": ("", "stripe[part]=="),
        "ONE_COPY": ("ONE_SHOT", "input[i]==call"),
    },
    processes={"Rank"},
)

# 37 million states: 2.9 GB, 4 minutes; 13, 5 and 6 million. They are searched, and all
# bugs but one of each model are planted, on request only: when a model changes.
LARGE = {"READERS=2", "LEAVE CRASH", "GRADS=2 TAKES=2", "GRADS=2 TIMEOUTS"}
SEARCH_LARGE = os.environ.get("HPCACCUM_LARGE_MODELS") == "1"

MODELS = {
    "accumulator": ACCUMULATOR,
    "updates": UPDATES,
    "servers": SERVERS,
    "node_update": NODE_UPDATE,
    "reduction": REDUCTION,
}


@pytest.fixture(scope="module")
def search(request, tmp_path_factory):
    """Search all states of a model with these macros; return what Spin prints.

    All searches start at once, as many at a time as there are cores.
    """
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        message = f"no {' and no '.join(missing)}: apt-get install {' '.join(missing)}"
        required = os.environ.get("HPCACCUM_REQUIRE_SPIN") == "1"
        (pytest.fail if required else pytest.skip)(message)

    def run(model: str, macros: str) -> str:
        folder = tmp_path_factory.mktemp("model")
        defines = [f"-D{macro}" for macro in macros.split()]
        output = ""
        for command in (
            ["spin", *defines, "-a", FOLDER / f"{model}.pml"],
            ["gcc", *_optimization(macros), "-w", "-DSAFETY", "-o", "pan", "pan.c"],
            # Depth, far more than needed; hash slots to begin with, as a power of 2: of
            # many, a search takes a tenth less time, but a bug needs few.
            ["./pan", "-m100000", "-w18" if "BUG_" in macros else "-w24"],
        ):
            output = _output(command, folder)
        return output

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        begun = {each: pool.submit(run, *each) for each in _wanted(request)}
        yield lambda *each: begun[each].result()
        pool.shutdown(cancel_futures=True)


def _optimization(macros: str) -> list[str]:
    # Nearly every bug is found within moments: to optimize would take longer. -O2 and
    # -DCOLLAPSE (less memory) take longer than they save, but in large searches.
    if macros in LARGE:
        return ["-O2", "-DCOLLAPSE"]
    return ["-O0" if "BUG_" in macros else "-O1"]


def _wanted(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Return the models and macros of the selected tests, in their order."""
    wanted = []
    for item in request.session.items:
        if item.path == request.path:
            chosen = getattr(item, "callspec", None)
            skipped = item.get_closest_marker("skip")
            if chosen and "macros" in chosen.params and not skipped:
                wanted.append((chosen.params["model"], chosen.params["macros"]))
    return wanted


def _output(command: list[str | Path], folder: Path) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200 if SEARCH_LARGE else 300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def _marks(on_request: bool) -> list[pytest.MarkDecorator]:
    reason = "minutes: set HPCACCUM_LARGE_MODELS=1"
    return [pytest.mark.skip(reason)] if on_request and not SEARCH_LARGE else []


@pytest.mark.parametrize(
    ("model", "macros"),
    [
        pytest.param(
            model, macros, id=f"{model}: {name}", marks=_marks(macros in LARGE)
        )
        for model in MODELS
        for name, macros in MODELS[model].configurations.items()
    ],
)
def test_the_protocol_has_no_error(search, model, macros):
    output = search(model, macros)

    assert ", errors: 0\n" in output
    assert_complete(output, MODELS[model].processes)
    chosen = macros.split()
    names = {"", macros, *chosen, *(macro.partition("=")[0] for macro in chosen)}
    happenings = MODELS[model].happenings
    expected = set().union(*(happenings.get(name, set()) for name in names))
    assert set(re.findall(r"^happens: (.*)$", output, re.MULTILINE)) >= expected


def assert_complete(output: str, processes: set[str]) -> None:
    for flaw in ("not completed", "max search depth too small", "out of memory"):
        assert flaw not in output
    assert "Full statespace search" in output
    assert re.search(r"invalid end states\s+\+", output)
    unreached = re.findall(r"^unreached in (.*)\n\s+(.*)$", output, re.MULTILINE)
    assert {who for who, _ in unreached} >= {f"proctype {each}" for each in processes}
    for who, what in unreached:
        assert what.startswith("(0 of "), f"{who} never reaches {what}"


@pytest.mark.parametrize(
    ("model", "macros", "assertion"),
    [
        pytest.param(
            model,
            f"{macros} BUG_{bug}",
            assertion,
            id=f"{model}: {bug}",
            marks=_marks(number > 0),
        )
        for model in MODELS
        for number, (bug, (macros, assertion)) in enumerate(MODELS[model].bugs.items())
    ],
)
def test_a_planted_bug_is_found(search, model, macros, assertion):
    output = search(model, macros)

    assert re.search(r"errors: [1-9]", output)
    violated = re.search(r"^pan:1: assertion violated (.*) \(at", output, re.MULTILINE)
    assert violated, output
    assert assertion in violated[1]
