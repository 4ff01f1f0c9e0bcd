"""A lock that signal handlers may interrupt."""

from __future__ import annotations

import signal
import threading
import time

from hpcaccum.lock import Lock, once


class Interrupted(BaseException):
    """What the signal handler raises."""


def interrupt(number, frame):
    raise Interrupted


def is_free(lock):
    """Whether another thread can acquire a lock."""
    acquired = []

    def acquire():
        acquired.append(lock.acquire(blocking=False))
        if acquired[0]:
            lock.release()

    other = threading.Thread(target=acquire)
    other.start()
    other.join()
    return acquired[0]


def use_again_and_again(lock):
    while True:
        with lock:
            pass


def test_an_exception_of_a_signal_handler_leaves_it_unlocked():
    lock = Lock()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        # Python 3.14 leaves one of `threading` locked at every second time.
        for number in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 1e-7)
                use_again_and_again(lock)
            except Interrupted:
                assert is_free(lock)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_thread_may_acquire_it_again_and_others_wait():
    lock = Lock()
    with lock:
        with lock:
            assert not is_free(lock)
        assert not is_free(lock)
    assert is_free(lock)


def test_threads_make_a_thing_once():
    made = []

    @once
    def make():
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    got = []
    threads = [threading.Thread(target=lambda: got.append(make())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert got == made * 4
