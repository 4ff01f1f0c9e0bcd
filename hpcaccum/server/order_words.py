"""The words and messages by which the root, agents and servers exchange orders."""

from __future__ import annotations

import math

import numpy as np

# Words of a node. Of a server: the number of its newest order, of the last that it has
# carried out, what it asks for, a number that belongs to that, and which gradients.
# Then, on the root's node, the last step of each server.
ORDER, DONE, KIND, DETAIL, BUFFER, MADE = range(6)
# Words of the root: the newest step that was ordered; again the last of each server,
# for messages of all ranks.
NEWEST = 0
# What an order asks a server for: an update, with a learning rate as bits; an answer,
# with the number of the question; to take the values that were assigned.
UPDATE, NO_UPDATE, ANSWER, END, ASSIGN = range(5)
# Channels of messages: gradients, parameters, questions to servers, answers.
GRADIENTS, PARAMETERS, QUESTIONS, ANSWERS = range(4)


def bits(rate: float | None) -> int:
    """Return a learning rate as a word; that of NaN for None."""
    return int(np.float64(math.nan if rate is None else rate).view(np.int64))


def rate_of(word: int) -> float | None:
    """Return the learning rate of a word."""
    rate = float(np.int64(word).view(np.float64))
    return None if math.isnan(rate) else rate
