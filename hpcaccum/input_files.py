"""Input of a command, and JSON, which may hold anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpcaccum.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, or raise InvalidArgumentError."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise InvalidArgumentError(f"{path}: {reason}") from None


def json_value(text: str) -> Any:
    """Return the value of a JSON text, or raise a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
