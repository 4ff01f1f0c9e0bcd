"""The loop of one server among several: update a part of the center as ordered."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpcaccum.deadline import Deadline
from hpcaccum.server.background import Background
from hpcaccum.server.order_words import (
    ANSWER,
    ASSIGN,
    END,
    NO_UPDATE,
    UPDATE,
    rate_of,
)
from hpcaccum.spans import traced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpcaccum.dtypes import Array
    from hpcaccum.server.role import Answer, Rate, Update
    from hpcaccum.server.sharded import ShardedParameters


class ShardLoop(Background):
    """Updates the part of the center that one rank holds, as the root orders.

    Args:
        parameters: Where orders come from; has this rank's part of the center.
        what: Name for messages.

    Attributes:
        center: Name to array: the part's.
        update: Called with the gradients and the learning rate of the root, if any.
        answer: Called with a question of the root; returns the answer.
    """

    def __init__(self, parameters: ShardedParameters, what: str) -> None:
        super().__init__()
        assert parameters.server is not None
        self._parameters, self._server, self._what = parameters, parameters.server, what
        self.center = self._server.shard.arrays(self._server.part)
        self.update: Update | None = None
        self.answer: Answer = lambda _: None
        self._kept: Mapping[str, Array] = {}
        # The last order that was carried out.
        self._number, self._kind = 0, NO_UPDATE

    def set_optimizer(self, update: Update, rate: Rate, answer: Answer) -> None:
        """Set what updates the part, and what answers questions."""
        self.update, self.answer = update, answer

    def run(self) -> None:
        """Carry out orders until the root ends them."""
        self._check_whole()
        while self._kind != END:
            # An idle server has no limit.
            deadline = Deadline(math.inf, f"{self._what}: server")
            order = self._parameters.next_order(self._number, deadline)
            number, kind, word, buffer = order
            if kind == UPDATE:
                self._broken = True
                self._make(self._server.gradients[buffer], rate_of(word))
            elif kind == ANSWER:
                limit = Deadline(None, f"{self._what}: server")
                self._parameters.questions.answer(self.answer, word, limit)
            elif kind == ASSIGN:
                self._assign()
            self._number, self._kind = number, kind
            self._parameters.done(number)
            self._broken = False

    def come_back(self) -> None:
        """Let `run`, which has ended, serve again."""
        self._kind, self._thread = NO_UPDATE, None

    def keep(self, values: Mapping[str, Array]) -> None:
        """Keep what will be assigned, until the root orders it."""
        self._kept = values

    def _assign(self) -> None:
        """Set this part to what was kept."""
        shard = self._server.shard
        for name, array in self.center.items():
            array[...] = shard.pieces(name, {name: self._kept[name]})[name]
        shard.write_parameters(self.center, self._server.part)
        self._kept = {}

    @traced("update")
    def _make(self, gradients: Array, rate: float | None) -> None:
        """Update the part, if there are gradients."""
        assert self.update is not None
        if grads := self._server.shard.read_gradients(gradients):
            self.update(grads, rate)
            self._server.shard.write_parameters(self.center, self._server.part)

    def _unfinished(self) -> str:
        return "the last updates of this server"
