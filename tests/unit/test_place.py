"""Where the main thread is, as another thread sees it."""

from __future__ import annotations

import threading
import time

from hpcaccum.deadline import Deadline
from hpcaccum.mpi.place import main_thread_place

from ..common import WAIT


def seen_from_a_thread(done: threading.Event) -> list[str]:
    """Return a list that will have the place; set ``done`` then."""
    places: list[str] = []

    def look() -> None:
        # Meanwhile the main thread comes to wait for it.
        while not main_thread_place().startswith(("join (", "test_outside")):
            pass
        time.sleep(0.05)
        places.append(main_thread_place())
        done.set()

    threading.Thread(target=look, daemon=True).start()
    return places


class Ending(threading.Thread):
    """Stands for a thread that ends when an event is set."""

    def __init__(self, done: threading.Event) -> None:
        super().__init__()
        self._done = done

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

    def is_alive(self) -> bool:
        return not self._done.is_set()


def test_it_is_the_function_that_the_program_called():
    done = threading.Event()
    places = seen_from_a_thread(done)
    # It waits in Python's library.
    Deadline(WAIT, "test").join(Ending(done), lambda: "the other thread")

    assert places[0].startswith("join (test_place.py:")


def test_outside_of_the_library_it_is_a_line_of_the_program():
    done = threading.Event()
    places = seen_from_a_thread(done)
    done.wait(WAIT)

    here = "test_outside_of_the_library_it_is_a_line_of_the_program"
    assert places[0].startswith(f"{here} (test_place.py:")
