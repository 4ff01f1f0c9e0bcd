"""The tags of messages on the private communicators of a group."""

from __future__ import annotations

from enum import IntEnum


class Tag(IntEnum):
    """What a message is for; `NONE` is a tag that no message has."""

    NONE = 0
    CONTROL = 1
    HEARTBEAT = 2
    CLOCK = 3
    TRACE = 4
    ARRIVAL = 5
