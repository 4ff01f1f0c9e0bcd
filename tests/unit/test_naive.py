"""The naive versions against TensorFlow's results, with a thread for each worker."""

from __future__ import annotations

import threading

import numpy as np

from ..naive import (
    SGD,
    Accumulator,
    AGNWorker,
    DropStale,
    Momentum,
    SyncReplicas,
    allreduce,
    cross_shard,
)


def model(value=0.0):
    return {"w": np.full(1, value)}


def gradient(value):
    return {"w": np.full(1, float(value))}


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_accumulator_drops_stale_gradients_and_takes_all_others():
    acc = Accumulator()
    assert acc.apply_grad(np.full(2, 10.0), 0)
    assert acc.apply_grad(np.full(2, 20.0), 7)
    assert acc.take_grad(1).tolist() == [15, 15]
    assert (acc.step, acc.count) == (1, 0)
    assert not acc.apply_grad(np.ones(2), 0)
    acc.set_global_step(0)
    assert acc.apply_grad(np.ones(2), 0)


def test_a_take_waits_for_the_one_before_it():
    acc, found = Accumulator("SUM"), []

    def take(count):
        found.append((count, float(acc.take_grad(count)[0])))

    first = threading.Thread(target=take, args=(3,), daemon=True)
    second = threading.Thread(target=take, args=(1,), daemon=True)
    first.start()
    while not acc.tickets:
        pass
    second.start()
    for _ in range(3):
        acc.apply_grad(np.ones(1), 1)
    first.join(20)
    acc.apply_grad(np.ones(1), 1)
    second.join(20)
    assert found == [(3, 3.0), (1, 1.0)]


def test_allreduce_and_groups():
    assert allreduce([np.ones(2), np.full(2, 3.0)]).tolist() == [2, 2]
    replicas = [model() for _ in range(4)]
    gradients = [gradient(rank) for rank in range(4)]
    cross_shard(replicas, [SGD(1)] * 4, gradients, [(0, 1), (2, 3)])
    assert [float(each["w"][0]) for each in replicas] == [-0.5, -0.5, -2.5, -2.5]


def test_sync_replicas_with_one_backup_worker():
    server = SyncReplicas(model(), SGD(0.1), quorum=2)

    def train():
        values, step = server.pull()
        while step < 50:
            if server.push({"w": values["w"] - 1}, step):
                values, step = server.pull(newer_than=step)
            else:
                values, step = server.pull()

    in_threads(train, train, train)
    assert server.step >= 50
    assert abs(server.values["w"][0] - 1) < 0.01


def test_drop_stale_counts_updates_since_the_pull():
    server = DropStale(model(), SGD(1), staleness=1)
    assert server.push(gradient(1), 0)
    assert server.push(gradient(1), 0)
    assert not server.push(gradient(1), 0)
    assert (server.step, server.dropped) == (2, 1)


def test_agn_of_one_worker():
    server = DropStale(model(), SGD(1), np.inf)
    worker = AGNWorker(server, SGD(1), period=3)
    found = []
    for value in range(1, 8):
        worker.step(gradient(value))
        found.append(worker.values["w"][0])
    assert found == [-1, -3, -2, -6, -11, -7, -14]
    assert server.step == 2


def test_agn_keeps_local_slots():
    server = DropStale(model(), Momentum(1, 0.5), np.inf)
    worker = AGNWorker(server, Momentum(1, 0.5), period=2)
    found = []
    for value in range(1, 6):
        worker.step(gradient(value))
        found.append(worker.values["w"][0])
    assert found == [-1, -1.5, -5.75, -5.75, -13.8125]


def test_agn_of_two_workers():
    server = DropStale(model(), SGD(1), np.inf)
    workers = [AGNWorker(server, SGD(1), period=2) for _ in range(2)]
    center = []
    for worker in (0, 1, 1, 0, 0, 1, 0, 1):
        workers[worker].step(gradient([1, 10][worker]))
        center.append(server.values["w"][0])
    assert center == [0, 0, -10, -11, -11, -11, -12, -22]
