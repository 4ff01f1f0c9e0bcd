"""``hpcaccum plan``: what it reads, and what it predicts."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import json

import numpy as np
import pytest

from hpcaccum import cli
from hpcaccum.accumulator import admits
from hpcaccum.accumulator.state import State
from hpcaccum.bench.plan import Measured, fit, simulated
from hpcaccum.plan.compute import Draws, compute
from hpcaccum.plan.prediction import predict, words
from hpcaccum.plan.setting import Machine, Setting, machine
from hpcaccum.plan.simulation import simulate

FREE = Machine(call=0, turn=0, update=0, reduce=0, copy=1e30, latency=0, link=1e30)
ONE_NODE = {"nodes": 1, "nbytes": 4096}


def predicted(strategy, ranks, text, costs=FREE, updates=2000, noise=None, **options):
    setting = Setting(strategy, ranks, **{**ONE_NODE, **options})
    return predict(setting, costs, compute(text), updates, range(1, 2), noise)


def drawn(text, ranks=4, nodes=1, count=20000):
    draws = Draws(compute(text), Setting("agn", ranks, nodes, 4), 0)
    return draws.draw(np.arange(ranks), count)


# The text of --compute


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("30ms", 0.03),
        ("1.5s", 1.5),
        ("200 us", 200e-6),
        ("normal 30ms 3ms", 0.03),
        ("lognormal 30ms 0.5", 0.03),
        ("exponential 30ms", 0.03),
        ("30ms; 50% x3", 0.06),
        ("30ms; 50% x2-4", 0.06),
    ],
)
def test_the_mean_is_the_one_of_the_text(text, mean):
    assert drawn(text).mean() == pytest.approx(mean, rel=0.01)


def test_changes_concern_the_ranks_and_nodes_that_they_name():
    means = drawn("10ms; rank 0 +5ms; node 1 x2; ranks 1-2 x3", nodes=2).mean(axis=1)

    assert means == pytest.approx([0.015, 0.03, 0.06, 0.02])


@pytest.mark.parametrize(
    "text", ["0.01 0.02\n0.03", "10ms\n20ms # slow\n30ms", "[0.01,0.02,0.03]"]
)
def test_times_of_a_file_are_read_in_order(tmp_path, text):
    path = tmp_path / "times"
    path.write_text(text)

    times = drawn(str(path), count=6)[0].tolist()

    assert times[:3] == times[3:]
    assert sorted(times[:3]) == pytest.approx([0.01, 0.02, 0.03])


def test_a_trace_has_the_times_of_each_rank(tmp_path):
    path = tmp_path / "trace.json"
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": rank,
            "ts": 0,
            "dur": 1000 * (rank + 1),
        }
        for rank in range(2)
        for name in ("compute", "wait")
    ]
    path.write_text(json.dumps({"traceEvents": events}))

    assert drawn(str(path), count=1)[:, 0] == pytest.approx([1e-3, 2e-3, 1e-3, 2e-3])


def test_a_log_has_the_times_of_each_rank(tmp_path):
    path = tmp_path / "log.jsonl"
    results = [{"gradient_seconds": [[each], [2 * each]]} for each in (0.1, 0.3)]
    lines = [{"event": "start"}, *({"event": "result"} | each for each in results)]
    path.write_text("\n".join(map(json.dumps, lines)))

    times = drawn(str(path), ranks=2, count=2)

    assert sorted(times[0]) == [0.1, 0.3]
    assert sorted(times[1]) == [0.2, 0.6]


FIRST = "the first term must be a time such as 30ms"
WRONG = {
    "": FIRST,
    "30": FIRST,
    "gamma 30ms": FIRST,
    "normal 30ms": "normal needs MEAN DEVIATION, got 'normal 30ms'",
    "normal 30ms 0.1": "DEVIATION of normal must be a time such as 30ms",
    "lognormal 30 0.1": "MEAN of lognormal must be a time such as 30ms",
    "lognormal 30ms 3ms": "SIGMA of lognormal, the deviation of the logarithm, must",
    "30ms; 6%": "term 2, '6%', must be '6% x3' or '6% x2-10'",
    "30ms; 160% x3": "term 2, '160% x3', must be '6% x3'",
    "30ms; 6% x3; rank 7": "term 3, 'rank 7', must be '6% x3'",
    "30ms; rank 2- x2": "term 2, 'rank 2- x2', must name numbers such as 7",
    "30ms; rank 7 +45": "term 2, 'rank 7 +45', its delay must be a time",
    "30ms; node 1 xb": "term 2, 'node 1 xb', its factor must be a number",
    "30ms; failures 0.01 restart 5m": "or 'failures 0.01/h restart 5m'",
    "30ms; 6% x10-2": "term 2, '6% x10-2', must be '6% x3'",
    "30ms; 6% x1e400": "its factor must be a number such as 0.3, finite and above 0",
    "30ms; rank 3-1 x2": "term 2, 'rank 3-1 x2', must name numbers such as 7",
    "1e400ms": f"{FIRST}, 'normal",
    "0ms": "or of train --log or --trace, finite and above 0, got '0ms'",
    "30ms; rank 1 +1e400s": "its delay must be a time such as 30ms, 1.5s or 200us, fin",
    "30ms; failures 1/h restart 1m; failures 2/h restart 1m": "is the second of fail",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_error_names_the_term_and_what_was_expected(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        compute(text)

    assert WRONG[text] in str(error.value)


LOG = '{"event": "start", "ranks": 3}\n{"event": "result", "waited": [0.1]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.1 1e400", "line 1: each must be a time such as 30ms, 1.5s or 200us, fin"),
        ('{"traceEvents": [{"name": "wait"}]}', "has no times of gradients"),
        (LOG, "has no times of gradients"),
    ],
)
def test_an_error_says_what_is_wrong_in_a_file(tmp_path, text, message):
    path = tmp_path / "times"
    path.write_text(text)

    with pytest.raises(argparse.ArgumentTypeError) as error:
        compute(str(path))

    assert message in str(error.value)


def test_the_network_has_a_latency_and_a_rate_for_each_level():
    found = machine("1us 25GB/s; 2us 12GB/s")

    assert (found.copy, found.latency, found.link) == (25e9, 2e-6, 12e9)


@pytest.mark.parametrize("text", ["25GB/s", "1us", "nofile.json", "1us 0GB/s", ""])
def test_an_error_has_the_network_that_was_given(text):
    with pytest.raises(argparse.ArgumentTypeError) as error:
        machine(text)

    assert "25GB/s" in str(error.value)
    assert repr(text.split()[-1] if "0GB" in text else text) in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("link", 0), ("copy", 0), *(("call", bad) for bad in (-1, np.nan, "a", None))],
)
def test_a_file_of_costs_is_checked(tmp_path, name, value):
    path, costs = tmp_path / "costs.json", {**vars(FREE), name: value}
    if value is None:
        del costs[name]
    path.write_text(json.dumps({"machine": costs}))

    with pytest.raises(argparse.ArgumentTypeError, match=f"{name} must be a number"):
        machine(str(path))


# What is predicted


@pytest.mark.parametrize("strategy", ["drop-stale", "agn", "local-steps"])
def test_equal_ranks_are_one_update_late_for_each_other_rank(strategy):
    found = predicted(strategy, 8, "normal 30ms 3ms")

    assert found.means["mean_lag"] == pytest.approx(7, rel=0.01)
    assert found.means["updates_per_second"] == pytest.approx(8 / 0.03, rel=0.02)
    assert not found.doubts


@pytest.mark.parametrize("staleness", [0, 2, 5])
def test_the_mean_lag_is_that_of_little_s_law_if_gradients_are_dropped(staleness):
    found = predicted("drop-stale", 12, "exponential 30ms", staleness=staleness)

    assert found.means["dropped"] > 0.1
    assert not found.doubts


def test_a_rank_pulls_updates_that_others_make_until_it_has_noticed_its_own():
    costs = dataclasses.replace(FREE, call=140e-6, update=60e-6)

    together = predicted("agn", 4, "30ms", costs, period=5)
    apart = predicted("agn", 4, "lognormal 30ms 0.3", costs, period=5)

    # 2.5 was measured with ranks that begin together, 2.9 with the others.
    assert together.means["mean_lag"] == pytest.approx(2.5, abs=0.3)
    assert apart.means["mean_lag"] == pytest.approx(3, rel=0.02)
    assert "ranks push together" in together.doubts[0]
    assert not apart.doubts


# Milliseconds of an update, of a simulation that others have made.
OTHERS = {8: 65.8, 7: 39.1, 6: 30.3, 5: 25.2}


@pytest.mark.parametrize("quorum", OTHERS)
def test_backup_workers_as_another_simulation_has_them(quorum):
    text, place = "20ms; 6% x2-10", {"quorum": quorum, "staleness": 0}

    found = predicted("sync-replicas", 8, text, **place)

    assert 1e3 / found.means["updates_per_second"] == pytest.approx(
        OTHERS[quorum], rel=0.1
    )


def each_of(draws, rank):
    while True:
        yield from draws.draw(np.array([rank]), 100)[0].tolist()


def naive(ranks, quorum, text, updates, staleness=0, period=1, fragments=1):
    """Return updates a second, the share that is dropped, and the mean lag.

    It has one event for each call. Fragment f is pushed in the calls whose number
    modulo the period is f / fragments of it, rounded down.
    """
    draws = Draws(compute(text), Setting("agn", ranks, 1, 4), 0)
    times = [each_of(draws, rank) for rank in range(ranks)]
    due = {f * period // fragments: f for f in range(fragments)}
    states = [State(0, 0, 0, 1, quorum)] * fragments
    waiting = [[] for _ in due]
    local = [[0] * fragments for _ in range(ranks)]
    calls, lags, drops, made = [1] * ranks, [], 0, 0
    heap = [(next(each), rank) for rank, each in enumerate(times)]
    heapq.heapify(heap)
    while made < updates:
        now, rank = heapq.heappop(heap)
        goes_on = [rank]
        if (f := due.get(calls[rank] % period)) is not None:
            step = states[f].step
            lags.append(step - local[rank][f])
            local[rank][f] = step
            if admits(lags[-1], 0, staleness):
                waiting[f].append(rank)
                states[f] = states[f].admitted(0)
                goes_on = []
                if states[f].step > step:
                    goes_on, waiting[f] = waiting[f], []
                    states[f] = states[f]._replace(waiting=1, number=quorum)
                    made += 1
                for each in goes_on:
                    local[each][f] = step + 1
            else:
                drops += 1
        for each in goes_on:
            calls[each] += 1
            heapq.heappush(heap, (now + next(times[each]), each))
    return updates / now, drops / len(lags), sum(lags) / len(lags)


def agrees(found, simulated):
    names = "updates_per_second", "dropped", "mean_lag"
    speed, dropped, lag = (found.means[name] for name in names)
    assert speed == pytest.approx(simulated[0], rel=0.03)
    assert dropped == pytest.approx(simulated[1], abs=0.01)
    assert lag == pytest.approx(simulated[2], rel=0.03, abs=0.01)
    assert not found.doubts


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("quorum", [3, 6, 8])
def test_rounds_are_those_of_the_accumulator(quorum, staleness):
    text = "lognormal 30ms 0.5; rank 7 x2"
    place = {"quorum": quorum, "staleness": staleness}

    found = predicted("sync-replicas", 8, text, **place)

    agrees(found, naive(8, quorum, text, 3000, staleness))


@pytest.mark.parametrize(("period", "fragments"), [(11, 6), (19, 10), (10, 3), (4, 4)])
def test_each_fragment_is_pushed_once_a_period(period, fragments):
    place = {"period": period, "fragments": fragments}

    found = predicted("local-steps", 4, "normal 30ms 3ms", **place)

    pushes = 4 * fragments / (period * 0.03)
    assert found.means["updates_per_second"] == pytest.approx(pushes, rel=0.02)
    assert found.means["samples_per_second"] == pytest.approx(4 / 0.03, rel=0.02)


@pytest.mark.parametrize(
    ("quorum", "staleness", "period", "fragments"),
    [(4, 0, 8, 8), (4, 0, 11, 3), (5, 0, 4, 2), (None, 6, 20, 20), (None, 2, 5, 3)],
)
def test_each_fragment_has_a_step_and_a_quorum_of_its_own(
    quorum, staleness, period, fragments
):
    place = {"period": period, "fragments": fragments, "staleness": staleness}
    text = "exponential 40ms; rank 5 x1.3"

    updates = 3000 // fragments
    found = predicted("local-steps", 6, text, updates=updates, **place, quorum=quorum)

    agrees(found, naive(6, quorum or 1, text, 10_000, **place))


def test_all_wait_for_the_slowest_rank():
    found = predicted("cross-shard", 8, "30ms; rank 3 x2")

    assert 1 / found.means["updates_per_second"] == pytest.approx(0.06, rel=0.02)
    assert np.argmin(found.waiting) == 3


def test_a_slow_rank_is_dropped_if_it_is_too_late():
    found = predicted("drop-stale", 4, "10ms; rank 3 x20", staleness=10)

    lags = found.lags
    assert found.means["dropped"] == pytest.approx(1 / 61, rel=0.1)
    assert sum(lags[20:]) / sum(lags) == pytest.approx(1 / 61, rel=0.1)


def test_the_link_of_one_server_is_the_bottleneck():
    place = {"nodes": 4, "nbytes": 10**8}
    costs = machine("1us 1000GB/s; 2us 10GB/s")

    one = predicted("drop-stale", 16, "30ms", costs, **place)

    assert one.means["busiest_link"] > 0.9
    remarks = list(words([one], compute("30ms")))
    assert "the server's link is the bottleneck: try --servers 2" in remarks[-1]


@pytest.mark.parametrize(("servers", "gradients"), [(1, 6), (2, 3), (4, 1.5)])
def test_the_link_limits_a_synchronous_job(servers, gradients):
    place = {"nodes": 4, "nbytes": 10**8, "quorum": 8, "staleness": 0}
    costs = machine("1us 1000GB/s; 2us 1GB/s")

    found = predicted("sync-replicas", 8, "3ms", costs, **place, servers=servers)

    # 3 nodes push to each server, then pull from it.
    seconds = 1 / found.means["updates_per_second"]
    used = found.means["busiest_link"] * seconds
    assert used == pytest.approx(gradients * 0.1, rel=0.01)
    assert found.means["busiest_link"] > 0.95
    cure = f": try --servers {2 * servers}" if servers < 4 else ""
    remarks = list(words([found], compute("3ms")))
    assert f"the server's link is the bottleneck{cure}" in remarks[-1]


def test_one_server_gets_one_gradient_at_a_time():
    costs = dataclasses.replace(FREE, update=5e-3, link=1e9)
    place = {"nodes": 4, "nbytes": 10**7}

    one, four = (
        predicted("drop-stale", 4, "1ms; rank 0 +1m", costs, **place, servers=each)
        for each in (1, 4)
    )

    # A gradient takes 10 ms to the server, before its update.
    assert 1 / one.means["updates_per_second"] == pytest.approx(0.015, rel=0.01)
    assert one.means["server_utilisation"] > 0.99
    remarks = list(words([one], compute("1ms")))
    assert "the server is the bottleneck: try --servers 2" in " ".join(remarks)
    rows = predicted("drop-stale", 4, "1ms", costs, **place, touched=0.5)
    assert "--servers" not in " ".join(words([rows], compute("1ms")))
    # Several servers get the next one meanwhile.
    assert 1 / four.means["updates_per_second"] < 0.011


def test_all_nodes_get_the_parameters_at_the_same_time():
    costs, text = dataclasses.replace(FREE, link=1e9), "10ms; rank 3 +16ms; rank 0 +1s"
    place = {"nodes": 4, "nbytes": 8 * 10**6, "quorum": 3, "staleness": 0}

    found = predicted("sync-replicas", 4, text, costs, **place).means

    seconds = 0.026 + 2 * 3 * 0.008
    assert 1 / found["updates_per_second"] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "options", "gradients"),
    [
        # Each node gets the rows of 6 ranks.
        ("cross-shard", {}, 6),
        # So does the server; then 3 nodes get the rows of all, or the whole table.
        ("sync-replicas", {"quorum": 8, "staleness": 0}, 6 + 3 * 100 * (1 - 0.99**8)),
        ("sync-replicas", {"quorum": 8, "touched": 0.03}, 6 * 3 + 3 * 100),
        # 3 nodes get twice in 8 updates what 4 of them have changed.
        ("drop-stale", {}, 6 / 8 * 100 * (1 - 0.99**4)),
    ],
)
def test_only_rows_cross_the_links(strategy, options, gradients):
    costs = dataclasses.replace(FREE, link=1e9)
    place = {"nodes": 4, "nbytes": 10**8, "touched": 0.01, **options}

    found = predicted(strategy, 8, "lognormal 300ms 0.3", costs, **place).means

    used = found["busiest_link"] / found["updates_per_second"]
    assert used == pytest.approx(gradients * 1e-3, rel=0.05)


def test_with_a_noise_scale_the_setting_with_most_progress_is_the_best():
    text = "exponential 30ms"
    settings = [{"quorum": each, "staleness": 0, "batch": 32} for each in (16, 8)]

    def found(noise):
        return [
            predicted("sync-replicas", 16, text, noise=noise, **each)
            for each in settings
        ]

    few, many = found(1.0), found(1e6)

    means = few[0].means
    progress = means["updates_per_second"] / (1 + 1 / (16 * 32))
    assert means["progress"] == pytest.approx(progress)
    # If a few samples are enough, those of the slowest ranks are not worth the wait.
    assert "quorum 8: " in next(iter(words(few, compute(text))))
    shares = [each.means["progress"] for each in many]
    samples = [each.means["samples_per_second"] for each in many]
    assert shares[0] / shares[1] == pytest.approx(samples[0] / samples[1], rel=0.01)


def test_the_words_say_what_helps_a_server():
    costs = dataclasses.replace(FREE, update=1e-3)

    small = predicted("drop-stale", 64, "3ms", costs, nodes=4)

    assert (
        "the server is the bottleneck: try fewer ranks"
        in list(words([small], compute("3ms")))[-1]
    )


def test_restarts_take_their_share_of_the_time():
    text = "30ms; failures 0.5/h restart 30m"
    place = {"nodes": 4, "nbytes": 10**7, "staleness": 20}
    costs = machine("1us 1000GB/s; 2us 10GB/s")

    found = predicted("drop-stale", 4, text, costs, **place).means
    without = predicted("drop-stale", 4, "30ms", costs, **place).means

    assert found["available"] == pytest.approx(0.5)
    names = "updates_per_second", "busiest_link", "server_utilisation"
    for name in names:
        assert found[name] == pytest.approx(without[name] / 2)


@pytest.mark.parametrize(
    ("text", "ranks", "nodes", "lost"),
    [
        ("30ms; rank 7 lost", 8, 1, (7,)),
        ("30ms; rank 2 lost; ranks 5-6 lost", 8, 1, (2, 5, 6)),
        ("30ms; node 2 lost", 8, 4, (4, 5)),
        ("30ms; rank 5 lost", 8, 4, (5,)),
        # A node is lost with its first rank.
        ("30ms; rank 4 lost", 8, 4, (4, 5)),
    ],
)
def test_ranks_are_lost(text, ranks, nodes, lost):
    assert compute(text).lost(ranks, nodes) == lost


def test_the_others_train_on_if_ranks_are_lost():
    text, lost = "lognormal 30ms 0.5; rank 1 x2", {"lost": (2, 3)}
    quorum = {"quorum": 8, "staleness": 0}

    shrunk = predicted("sync-replicas", 8, text, **quorum, **lost)
    apart = predicted("drop-stale", 8, "30ms", **lost)
    slow = predicted("cross-shard", 8, "30ms; rank 2 x9; rank 7 x2", **lost)

    agrees(shrunk, naive(6, 6, text, 3000))
    assert apart.means["updates_per_second"] == pytest.approx(6 / 0.03, rel=0.02)
    assert 1 / slow.means["updates_per_second"] == pytest.approx(0.06, rel=0.02)
    said = list(words([slow], compute("30ms")))
    assert said[0].startswith("8 ranks, ranks 2-3 lost: 6 train on")
    assert said[-1].endswith("all wait for rank 7")


@pytest.mark.parametrize("strategy", ["cross-shard", "sync-replicas", "drop-stale"])
def test_a_seed_gives_the_same_again(strategy):
    quorum = 3 if strategy == "sync-replicas" else None
    setting = Setting(strategy, 4, **ONE_NODE, quorum=quorum, staleness=8)

    def speed(seed):
        text = compute("exponential 30ms")
        return simulate(setting, Machine(), text, 200, seed).seconds

    assert speed(1) == speed(1) != speed(2)


@pytest.mark.parametrize(("strategy", "moves"), [("agn", 5), ("local-steps", 3)])
def test_a_local_step_takes_the_longer_the_larger_the_model_is(strategy, moves):
    costs = dataclasses.replace(FREE, copy=10e9)

    found = predicted(strategy, 2, "30ms", costs, nbytes=10**7, period=5)

    # Then a push and a pull, and an update of three moves.
    seconds = 5 * (0.03 + moves * 1e-3) + 5e-3
    assert 2 / found.means["updates_per_second"] == pytest.approx(seconds, rel=0.03)


# The costs


def test_costs_are_found_that_take_the_measured_times():
    known = Machine(call=300e-6, turn=30e-6, update=40e-6, reduce=50e-6, copy=5e9)
    measured = []
    for ranks, nbytes in itertools.product((2, 4), (4096, 1 << 22)):
        place = {"ranks": ranks, "nodes": 1, "nbytes": nbytes}
        for setting in (
            Setting("cross-shard", **place),
            Setting("sync-replicas", **place, quorum=ranks, staleness=0),
            Setting("drop-stale", **place),
        ):
            took = simulated(setting, known)
            measured.append(Measured(setting, took, known.update, 1e-3))

    found = fit(measured, 8)

    assert found.update == known.update
    assert found.call == pytest.approx(known.call, rel=0.1)
    assert found.copy == pytest.approx(known.copy, rel=0.1)


@pytest.mark.parametrize("strategy", ["cross-shard", "sync-replicas"])
def test_ranks_that_share_cores_wait_for_each_other(strategy):
    costs = dataclasses.replace(FREE, work=1e-3, cores=4)
    quorum = None if strategy == "cross-shard" else 8

    alone, shared = (
        predicted(strategy, ranks, "30ms", costs, quorum=quorum and ranks)
        for ranks in (4, 16)
    )

    assert 1 / alone.means["updates_per_second"] == pytest.approx(0.030, rel=0.01)
    # 16 ms of work on 4 cores, of which each rank had 1 ms by itself.
    assert 1 / shared.means["updates_per_second"] == pytest.approx(0.033, rel=0.01)


@pytest.mark.parametrize(
    ("costs", "place", "doubt"),
    [
        ({"ranks": 4}, {}, "extrapolated from 4 ranks on a node to 8"),
        ({"nbytes": 1 << 10}, {}, "extrapolated from gradients of"),
        ({"nodes": 1}, {"nodes": 2}, "the costs between nodes are the usual ones"),
        ({"ranks": 8, "nodes": 1, "nbytes": 1 << 20}, {}, ""),
    ],
)
def test_what_was_not_measured_is_marked(costs, place, doubt):
    costs = dataclasses.replace(Machine(), **costs)

    found = predicted("cross-shard", 8, "30ms", costs, **place)

    assert len(found.doubts) == bool(doubt)
    assert "".join(found.doubts).startswith(doubt)


def test_one_level_of_a_network_is_that_of_a_node():
    assert machine("1us 25GB/s").nodes == 1


# The command


def test_the_command_writes_a_line_for_each_setting(tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = "plan --ranks 4,8 --nodes 2 --updates 100 --repeats 2 --quorum 3 --json"

    assert cli.main([*words.split(), str(path), "--compute", "30ms; 6% x3"]) == 0

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["strategy"] for row in rows[:2]] == ["cross-shard", "sync-replicas"]
    assert len(rows) == 10
    wanted = {
        *("strategy", "ranks", "quorum", "staleness", "period", "servers"),
        *("updates_per_second", "samples_per_second", "dropped", "mean_lag"),
        *("lag_p90", "waiting", "busiest_link", "server_utilisation", "memory_bytes"),
        "intervals",
    }
    assert all(wanted <= set(row) for row in rows)
    assert {row["servers"] for row in rows} == {1, 2}
    low, high = rows[1]["intervals"]["dropped"]
    assert low <= rows[1]["dropped"] <= high
    assert "\n8 ranks, every update waits: " in capsys.readouterr().out


def test_the_command_shows_progress_by_a_noise_scale(tmp_path, capsys):
    path = tmp_path / "plan.json"
    words = "plan --ranks 8 --nodes 2 --parameters 25M --touched 1% --noise-scale 500"

    assert cli.main([*words.split(), "--compute", "30ms", "--json", str(path)]) == 0

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["noise_scale"] for row in rows} == {500}
    assert {row["servers"] for row in rows} == {1}
    assert all(row["progress"] < row["updates_per_second"] / 6 for row in rows)
    shown = capsys.readouterr().out
    assert "progress: updates/s of very large batches" in shown
    assert f"{rows[0]['progress']:.3g}" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compute", "30"], "argument --compute: the first term must be a time"),
        (["--compute", "30ms", "--ranks", "8:4"], "argument --ranks: must be"),
        (
            ["--compute", "30ms; rank 8 x2"],
            "--compute: rank 8 does not exist; the last",
        ),
        (["--compute", "30ms", "--quorum", "5"], "--quorum: 5 is more than 4 ranks"),
        (["--compute", "30ms", "--servers", "2"], "--servers: 2 servers need as many"),
        (["--compute", "30ms; node 1 x2"], "of 4 ranks on 1 node is node 0"),
        (["--compute", "30ms", "--touched", "2"], "--touched: must be a share such as"),
        (
            ["--compute", "30ms", "--nodes", "2", "--touched", "2%", "--servers", "2"],
            "--servers: sparse variables have one server",
        ),
        (["--compute", "30ms; rank 0 lost"], "--compute: rank 0 cannot be lost"),
        (
            ["--compute", "30ms", "--quorum", "3", "--staleness", "2"],
            "local-steps has --quorum or --staleness, not both",
        ),
    ],
)
def test_bad_options_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "--ranks", "4", *words])

    assert left.value.code == 2
    assert message in capsys.readouterr().err
