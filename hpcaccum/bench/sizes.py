"""The sizes of ``--sizes``: single ones, lists and ranges."""

from __future__ import annotations

import argparse
import re

# A vector is cut into 32 arrays of 4-byte numbers.
_GRAIN = 128
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30}
_FACTOR = 4


def sizes(text: str) -> tuple[int, ...]:
    """Return the bytes that a word such as ``1K,4K:1M:2`` stands for.

    Args:
        text: Sizes and ranges, separated by commas. A range ``FIRST:LAST`` or
            ``FIRST:LAST:FACTOR`` is multiplied by the factor, 4 by default, as long as
            the last size is not exceeded.

    Raises:
        argparse.ArgumentTypeError: If it means something else.
    """
    return tuple(size for part in text.split(",") for size in _range(part))


def _range(text: str) -> list[int]:
    first, *rest = text.split(":")
    if not rest:
        return [_size(first)]
    if len(rest) > 2:
        raise argparse.ArgumentTypeError(
            f"must be a range such as 4K:256M or 4K:256M:2, got {text!r}"
        )
    size, last = _size(first), _size(rest[0])
    factor = _factor(rest[1]) if rest[1:] else _FACTOR
    if size > last:
        raise argparse.ArgumentTypeError(
            f"must be a range from a smaller to a larger size, got {text!r}"
        )
    found = [size]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def _factor(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII) or text == "1":
        raise argparse.ArgumentTypeError(
            f"must have a factor from 2 on as the third part of a range, got {text!r}"
        )
    return int(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not found:
        raise argparse.ArgumentTypeError(
            f"must be a number, optionally with K, M or G, got {text!r}"
        )
    size = int(found[1]) << _UNITS[found[2].upper()]
    if size == 0 or size % _GRAIN:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {_GRAIN} bytes, got {text!r}"
        )
    return size
