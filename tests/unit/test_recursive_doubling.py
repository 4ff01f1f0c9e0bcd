"""Who exchanges with whom in recursive doubling."""

from __future__ import annotations

import pytest

from hpcaccum.reducer.recursive_doubling import pairings


def rank_of(rank, size, box):
    """Exchange sets of ranks as `RecursiveDoubling` does vectors; return the last."""
    found = {rank}
    for number, (peer, sends, receives) in enumerate(pairings(rank, size)):
        if sends:
            box.setdefault((rank, peer), []).append(found)
        if receives:
            while not box.get((peer, rank)):
                yield None
            other = box[peer, rank].pop(0)
            # At the end, a rank may get the sum of all, with what it has sent.
            assert found < other if number and not sends else not found & other
            found = found | other
    yield found


@pytest.mark.parametrize("size", range(1, 34))
def test_each_rank_gets_the_sum_of_all_once(size):
    box = {}
    ranks = [rank_of(rank, size, box) for rank in range(size)]
    ends = [None] * size
    while None in ends:
        ends = [end or next(each) for end, each in zip(ends, ranks, strict=True)]

    assert ends == [set(range(size))] * size
    assert not any(box.values())
    rounds = [len(pairings(rank, size)) for rank in range(size)]
    assert max(rounds) <= size.bit_length() + 1
