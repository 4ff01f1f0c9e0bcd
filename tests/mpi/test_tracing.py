"""Traces of real runs: what is in the file, and what a failure leaves behind."""

import json
import logging
from collections import Counter

import numpy as np
import pytest

import hpcaccum as hpc
from hpcaccum import InvalidArgumentError, deadline, spans, tracing
from hpcaccum.spans import MARKED

from .reducing import made_up
from .training import WRAPPERS, check_error, gives, meet, raised, started, variable

pytestmark = pytest.mark.any_size

# Long enough that the ranks of a node share the work of an update.
LENGTH = 70_000
# The category of the updates that a host makes.
_UPDATE = "UpdateLoop._make"


@pytest.fixture
def traced(comm, tmp_path):
    """Trace a call; return the contents of the file on all ranks. Collective."""

    def run(act, on=comm):
        path = tmp_path / "trace.json"
        with hpc.trace(path, on):
            act()
        return meet(json.loads(path.read_text()) if comm.rank == 0 else None)[0]

    return run


@pytest.fixture
def nodes(comm):
    return made_up(comm, "halves")


def events(file):
    return [event for event in file["traceEvents"] if event["ph"] == "X"]


def rows(file):
    """Return the name of each row by its number, as pairs with that of its node."""
    names = {"process_name": {}, "thread_name": {}}
    for event in file["traceEvents"]:
        if event["ph"] == "M" and event["name"] in names:
            key = event["pid"], event["tid"]
            names[event["name"]][key] = event["args"]["name"]
    nodes = {node: name for (node, _), name in names["process_name"].items()}
    return {key: (nodes[key[0]], name) for key, name in names["thread_name"].items()}


def check_file(file):
    """Check what the viewers need."""
    found, named = {}, rows(file)
    assert len({thread for _, thread in named}) == len(named)
    for event in events(file):
        assert event["name"]
        assert event["cat"]
        assert event["dur"] >= 0
        assert isinstance(event.get("args", {}).get("step", 0), int), event
        found.setdefault((event["pid"], event["tid"]), []).append(event)
    assert found.keys() <= named.keys()
    for row in found.values():
        check_nesting(row)


def check_nesting(row):
    ends = []
    for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = round(event["ts"] + event["dur"], 3)
        assert not ends or end <= ends[-1], event
        ends.append(end)


def train(maker, on, **options):
    w = variable(np.zeros(LENGTH), np.float32)
    with started(maker(hpc.SGD(0.1), [w], on, **options), [w]) as opt:
        for _ in range(4):
            opt.minimize(gives(np.ones(LENGTH, np.float32)), var_list=[w])


def train_with_all(on):
    for maker in WRAPPERS.values():
        train(maker, on)


def use_parts(comm, taker=0):
    """Use what no optimizer uses."""
    for storage in "slots", "sum":
        with hpc.ConditionalAccumulator("f4", (8,), comm=comm, storage=storage) as acc:
            acc.apply_grad(np.ones(8, "f4"))
            if comm.rank == taker:
                acc.take_grad(comm.size)
    with hpc.SparseConditionalAccumulator("f4", (8, 1), comm=comm, capacity=1) as acc:
        acc.apply_grad([3], np.ones((1, 1)))
    layout = hpc.Layout({"x": (8,)}, "float32")
    with hpc.Reducer(layout, comm) as reducer:
        reducer.start("x", np.ones(8, "f4"))
        reducer.wait()


def test_file_of_all_strategies(traced, comm):
    file = traced(lambda: train_with_all(comm))
    names = Counter(event["name"] for event in events(file))
    ranks = {name for _, name in rows(file).values()}

    check_file(file)
    assert file["otherData"]["events_left_out"] == {}
    # Four gradients of each rank and strategy.
    assert names["compute"] == 4 * len(WRAPPERS) * comm.size
    calls = Counter(e["args"]["call"] for e in events(file) if e["name"] == "reduce")
    assert calls == dict.fromkeys(range(1, 5), comm.size)
    updates = Counter(
        event["args"]["step"] for event in events(file) if event["cat"] == _UPDATE
    )
    # Three strategies make them; drop-stale makes one for each gradient.
    assert updates[1] == 3
    assert set(updates) == set(range(1, 4 * comm.size + 1))
    assert {f"rank {rank}" for rank in range(comm.size)} <= ranks
    assert "rank 0: server (UpdateLoop)" in ranks


@pytest.mark.ranks(min=2)
@pytest.mark.usefixtures("one_node")  # the ranks of a node update together
def test_every_marked_method_is_in_a_trace(traced, comm, nodes):
    servers = [each[0] for each in nodes.nodes]

    def act():
        train_with_all(comm)
        train_with_all(nodes)
        train(WRAPPERS["SyncReplicas"], nodes, servers=servers)
        use_parts(comm)
        use_parts(nodes, comm.size - 1)

    file = traced(act, nodes)
    found = {event["cat"]: event["name"] for event in events(file)}
    expected = {row.label.category: row.label.name for row in MARKED}
    expected["Deadline.wait"] = "wait"

    check_file(file)
    assert found == expected


@pytest.fixture
def late(nodes, monkeypatch):
    """Set the clock of the second node forward; return by how much this rank's is."""
    seconds, real = 1000.0 * nodes.node_number, spans.clock
    for module in deadline, spans, tracing:
        monkeypatch.setattr(module, "clock", lambda: real() + seconds)
    return seconds


@pytest.mark.ranks(min=2)
def test_nodes_and_their_agents_have_rows(traced, comm, nodes, late):
    file = traced(lambda: train(WRAPPERS["SyncReplicas"], nodes), nodes)
    found = {name: number for (number, _), (_, name) in rows(file).items()}
    accuracy = file["otherData"]["clock_error_us"]
    begins = {}
    for event in events(file):
        begins.setdefault(event["pid"], []).append(event["ts"])

    check_file(file)
    assert accuracy > 0
    for number, ranks in enumerate(nodes.nodes, 1):
        assert all(found[f"rank {rank}"] == number for rank in ranks)
        agents = [name for name in found if name.startswith(f"rank {ranks[0]}: agent")]
        assert agents
        assert found[agents[0]] == number
    # No node begins after another one has ended.
    assert max(map(min, begins.values())) < min(map(max, begins.values())) + accuracy


def test_lag_and_step_of_a_gradient(traced, comm, rank):
    with hpc.ConditionalAccumulator("f4", (2,), comm=comm) as acc:
        acc.set_global_step(5)
        meet()
        file = traced(lambda: acc.apply_grad([1.0, 1.0], 5 - rank))
        meet()
    named = {key: name for key, (_, name) in rows(file).items()}
    found = {
        named[event["pid"], event["tid"]]: event["args"]
        for event in events(file)
        if event["name"] == "admission"
    }

    assert found == {
        f"rank {each}": {"accepted": each == 0, "lag": each, "step": 5}
        for each in range(comm.size)
    }


def test_events_that_were_left_out_are_counted(traced, comm, caplog, monkeypatch):
    monkeypatch.setattr(spans, "MOST", 10)

    def act():
        for _ in range(12):
            with hpc.span("work"):
                pass

    with caplog.at_level(logging.WARNING, "hpcaccum"):
        file = traced(act)

    assert len(events(file)) == 10 * comm.size
    assert file["otherData"]["events_left_out"] == {
        f"rank {rank}": 2 for rank in range(comm.size)
    }
    if comm.rank == 0:
        assert f"{2 * comm.size} events of rank" in caplog.text
        assert caplog.text.strip().endswith("a rank keeps the first 10")


def test_an_error_leaves_no_trace_running(traced, comm, tmp_path):
    path = tmp_path / "none.json"
    with pytest.raises(KeyError, match="mine"), hpc.trace(path, comm):
        raise KeyError("mine")

    assert not path.exists()
    assert traced(lambda: None)["otherData"]["events_left_out"] == {}


def test_only_one_trace_at_a_time(traced, comm, tmp_path):
    def act():
        second = hpc.trace(tmp_path / "second.json", comm)
        check_error(raised(second.__enter__), "a trace is running already")

    traced(act)


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("no/such/trace.json", InvalidArgumentError, "no/such/trace.json: No such"),
        (None, TypeError, "NoneType"),
    ],
)
def test_a_bad_path_is_an_error_on_every_rank(comm, path, kind, message):
    check_error(raised(hpc.trace(path, comm).__enter__), message, kind=kind)


def test_a_full_disk_is_an_error_on_rank_0_and_no_hang(comm, rank):
    def act():
        with hpc.trace("/dev/full", comm):
            for _ in range(3000):
                with hpc.span("work"):
                    pass

    error = raised(act)

    assert isinstance(error, OSError) == (rank == 0)
    assert rank == 0 or error is None
