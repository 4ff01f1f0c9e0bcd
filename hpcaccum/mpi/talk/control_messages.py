"""Tags of messages; those of ranks to rank 0 in a `ControlChannel`, and its answers.

All these classes are known to every rank, so that each message can be unpickled.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A rank has entered exchange ``number``, after its complete calls by track.

    Its value is pickled in a message.
    """

    number: int
    what: str
    ending: bool
    value: Any
    complete: dict[int, int]

    def __str__(self) -> str:
        return self.what + (" (at the end of its program)" if self.ending else "")


class Report(NamedTuple):
    """A rank waits in call ``number`` of a track; in none if that is track 0."""

    track: int
    number: int
    what: str
    complete: dict[int, int]

    def __str__(self) -> str:
        return self.what


class Arrival(NamedTuple):
    """The sender has waited for a long time in call ``number`` of a track."""

    track: int
    number: int


class GaveUp(NamedTuple):
    """A rank has stopped waiting for the answer to an exchange.

    If it has found that a rank is lost, ``lost`` says which, and why.
    """

    number: int
    reason: str
    lost: str = ""


class Answer(NamedTuple):
    """The values of all ranks in an exchange, pickled."""

    number: int
    values: bytes


class Failure(NamedTuple):
    """Exchange ``number`` has failed on all ranks, as have calls of these tracks."""

    number: int
    tracks: tuple[int, ...]
    kind: type[Exception]
    text: str


class Seen(NamedTuple):
    """Rank 0 has received a report; the rank may send the next one."""


class Tag(IntEnum):
    """What a message is for; `NONE` is a tag that no message has."""

    NONE = 0
    CONTROL = 1
    HEARTBEAT = 2
    CLOCK = 3
    TRACE = 4
