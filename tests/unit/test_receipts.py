"""Receipts: what they print."""

from __future__ import annotations

from hpcaccum.accumulator import Receipt


def test_a_receipt_is_printed_in_a_line():
    receipts = [
        Receipt(True, 7, 7, loss=0.5),
        Receipt(False, 4, 7),
        Receipt(False, 7, 7, nonfinite=True),
        Receipt(True, 3, 3, sent=False),
        Receipt(True, 0, 2),
    ]
    assert list(map(str, receipts)) == [
        "accepted, lag 0, step 7",
        "not accepted: stale, lag 3, step 7",
        "not accepted: nonfinite, lag 0, step 7",
        "accepted, not sent, lag 0, step 3",
        "accepted, lag 2, step 2",
    ]


def test_a_receipt_is_true_if_accepted():
    accepted, dropped = Receipt(True, 7, 5), Receipt(False, 2, 5)

    assert accepted
    assert not dropped
    assert (accepted.lag, dropped.lag) == (-2, 3)
    assert (accepted.reason, dropped.reason) == ("", "stale")
