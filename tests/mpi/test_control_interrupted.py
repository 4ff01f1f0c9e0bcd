"""Messages, exchanges and the end of objects that a signal handler interrupts."""

from __future__ import annotations

import sys
import threading

import pytest
from mpi4py import MPI

from hpcaccum.errors import DisagreementError, WaitTimeoutError
from hpcaccum.mpi import Freeable, heartbeat
from hpcaccum.mpi.control import ControlChannel, Track
from hpcaccum.mpi.control_messages import Seen, Tag
from hpcaccum.mpi.group import Group
from hpcaccum.mpi.mailbox import Mailbox
from hpcaccum.mpi.progress import ProgressThread

from ..common import WAIT
from .acting import at, attempt, until
from .interrupting import at_each_point, interrupt
from .support import meet

# Runs on 2, 3 and 4 ranks together try all points.
EVERY = 3


@pytest.fixture(autouse=True)
def limited(monkeypatch):
    """A wait that would not end fails."""
    monkeypatch.setenv("HPCACCUM_TIMEOUT", str(WAIT))


@pytest.fixture(params=["first", "last"])
def odd(request, size):
    """The rank that is interrupted."""
    return 0 if request.param == "first" else size - 1


class Thing(Freeable):
    """Has nothing to free but what its group keeps for it."""

    def __init__(self, group):
        self._register(group, group.label("thing"))

    def _free(self):
        pass


@pytest.fixture(name="mail")
def mailboxes(comm):
    """Make a mailbox on each rank."""
    return lambda: Mailbox(comm, Tag.CONTROL)


def arrived(mailbox, found, count):
    """Receive until there are so many messages."""

    def complete():
        found.extend(mailbox.receive())
        return len(found) >= count

    until(complete)


@pytest.mark.ranks(min=2)
def test_an_interrupted_message_is_counted_if_it_is_sent(mail, rank, size):
    def trial(number):
        mailbox, found = mail(), []
        more = interrupt(lambda: mailbox.send((1, 0), "perhaps"), number)
        mailbox.send((1, 0), "last")
        while not rank > 1 and [text for _, text in found].count("last") < size:
            arrived(mailbox, found, len(found) + 1)
        mailbox.drain()
        came = [source for source, text in found if text == "perhaps"]
        assert len(came) == len(set(came))
        return any(meet(more)), None

    at_each_point(trial, EVERY)


@pytest.mark.ranks(min=2)
def test_an_interrupted_receiver_loses_no_message(mail, rank, size):
    def trial(number):
        mailbox, found = mail(), []
        for count in range(3):
            mailbox.send([(rank + 1) % size], count)

        def receive():
            found.extend(mailbox.receive())

        meet()
        more = interrupt(receive, number)
        until(lambda: receive() or (found and found[-1][1] == 2))
        mailbox.drain()
        # One that was being used may come twice.
        assert list(dict.fromkeys(count for _, count in found)) == [0, 1, 2]
        return any(meet(more)), None

    at_each_point(trial)


@pytest.mark.ranks(min=2)
def test_an_interrupted_drain_goes_on(mail, rank, size, odd):
    def trial(number):
        mailbox = mail()
        mailbox.send([(rank + 1) % size], "lost")
        more = rank == odd and interrupt(mailbox.drain, number)
        mailbox.drain()
        assert not list(mail().receive())
        return meet(more)[odd], None

    at_each_point(trial, EVERY)


@pytest.mark.ranks(min=2)
def test_an_interrupted_exchange_ends_on_all_ranks(comm, rank, size, odd):
    def trial(number):
        control, more = ControlChannel(comm), False

        def ask():
            assert control.gather(rank, "lunch") == list(range(size))

        if rank == odd:
            more = interrupt(ask, number)
        if rank != odd or not control._number:
            error = attempt(ask)[1]
            assert error is None or type(error) is WaitTimeoutError
        assert control.gather(rank, "dinner") == list(range(size))
        control.drain()
        return meet(more)[odd], None

    at_each_point(trial, EVERY)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("call", ["exchange", "reduction"])
def test_an_interrupted_failure_is_told_to_all_ranks(comm, rank, size, call):
    def trial(number):
        control = ControlChannel(comm)
        track = control.open_track("reduction")

        def differ():
            if rank or call == "exchange":
                control.gather(rank, "lunch" if rank else "supper")
            control.check(track, Late())

        more = False
        if rank == 0:
            until(lambda: control._receive_all() or len(control._calls) == size - 1)
            more = interrupt(differ, number)
        while not control._number:
            assert type(attempt(differ)[1]) in (DisagreementError, WaitTimeoutError)
        assert control.gather(rank, "dinner") == list(range(size))
        control.drain()
        return meet(more)[0], None

    at_each_point(trial, EVERY)


@pytest.mark.ranks(min=2)
def test_an_interrupted_report_is_withdrawn_and_made_again(comm, rank, monkeypatch):
    monkeypatch.setattr("hpcaccum.mpi.control._PATIENCE", 0.0)

    def trial(number):
        control = ControlChannel(comm)
        track = control.open_track("call")
        more = rank == 1 and interrupt(lambda: waits(control, track), number)
        catch_up(control)
        assert at(0, is_waiting, control) is not meet(more)[1]
        if rank == 1:
            until(lambda: waits(control, track) or control._reported == (1, 1))
        reported(control, True)
        if rank == 1:
            control.depart(track)
        reported(control, False)
        if rank == 1:
            until(lambda: control._receive_all() or not control._unseen)
        control.drain()
        return meet(more)[1], None

    at_each_point(trial, EVERY)


def waits(control: ControlChannel, track: Track) -> None:
    """Look, as a rank that waits in a call does; withdraw what is interrupted."""
    try:
        control.check(track, Late())
    except BaseException:
        control.depart(track)
        raise


def catch_up(control: ControlChannel) -> None:
    """Let rank 0 receive what rank 1 has sent. Collective."""
    # Of all messages only this one leaves the reports alone.
    if MPI.COMM_WORLD.rank == 1:
        control._mailbox.send([0], Seen())
    if MPI.COMM_WORLD.rank == 0:
        control._unseen = True
        until(lambda: control._receive_all() or not control._unseen)


def is_waiting(control: ControlChannel) -> bool:
    """Return whether rank 1 has reported that it waits in a call, for rank 0."""
    return 1 in control._reports and control._reports[1].number > 0


def reported(control: ControlChannel, waiting: bool) -> None:
    """Let rank 0 wait until rank 1 reports that it waits, or does not. Collective."""

    def arrives():
        control._receive_all()
        return is_waiting(control) == waiting

    at(0, until, arrives)


class Late:
    """A deadline of which half has passed."""

    elapsed = remaining = 1.0


class Heart:
    """Stands for a heartbeat."""

    interval = 1.0

    def __init__(self):
        self.looks = 0

    def look(self):
        self.looks += 1


def others(before):
    """Return the threads of heartbeats that run now and did not run before."""
    now = {*threading.enumerate()}
    return [each for each in now - before if each.name == "heartbeat"]


def test_after_an_interrupted_start_a_thread_looks_after_heartbeats():
    def trial(number):
        thread, first, second = heartbeat._Thread(), Heart(), Heart()
        more = interrupt(lambda: thread.add(first), number)
        thread.add(second)
        until(lambda: second.looks)
        for each in (first, first, second, second):
            thread.remove(each)
        until(lambda: thread._thread is None)
        until(lambda: not others(before))
        return more, None

    before = {*threading.enumerate()}

    at_each_point(trial)


@pytest.mark.own_comm
@pytest.mark.ranks(min=2)
def test_an_interrupted_free_stops_the_heartbeat_when_it_is_repeated(comm, rank, odd):
    group = Group.of(comm)

    def trial(number):
        thing = Thing(group)
        more = rank == odd and interrupt(thing.free, number)
        thing.free()
        assert (group._heartbeat, group._objects) == (None, [])
        # As other objects do: the heartbeat must have been stopped on all ranks.
        meet()
        after = Thing(group)
        assert group._heartbeat in heartbeat._thread._hearts
        assert heartbeat._thread._thread.is_alive()
        after.free()
        assert heartbeat._thread._hearts == hearts
        until(lambda: not others(before))
        return meet(more)[odd], None

    # Objects that several tests use may have some.
    hearts, before = [*heartbeat._thread._hearts], {*threading.enumerate()}
    at_each_point(trial, EVERY)


def test_an_interrupted_free_of_the_communicators_goes_on():
    def trial(number):
        group = Group(MPI.COMM_SELF.Dup())
        thing = Thing(group)
        group.close()
        more = interrupt(thing.free, number)
        thing.free()
        assert not group.comm
        assert not group.node
        return more, None

    at_each_point(trial)


# Python's, in seconds; another thread of hpcaccum may have set a shorter one.
DEFAULT_INTERVAL = 0.005


@pytest.mark.parametrize("begins", [True, False])
def test_an_interrupted_progress_thread_starts_again(comm, begins):
    before = sys.getswitchinterval()

    def window():
        return memoryview(b"")

    def trial(number):
        progress = ProgressThread(comm)
        if begins:
            more = interrupt(lambda: progress.start(window), number)
        else:
            progress.start(window)
            more = interrupt(lambda: progress.stop(window), number)
        progress.start(window)
        until(progress._thread.is_alive)
        until(lambda: sys.getswitchinterval() < DEFAULT_INTERVAL)
        progress.stop(window)
        assert progress._thread is None
        assert sys.getswitchinterval() == before
        return more, None

    at_each_point(trial)
