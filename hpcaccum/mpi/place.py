"""Where a rank is, for messages about it."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from pathlib import Path

# The directory of the library, what in it is a program, and other libraries.
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PROGRAMS = tuple(
    _PACKAGE + each for each in ("bench", "launch", "train", "cli.py", "__main__.py")
)
_INSTALLED = tuple(
    sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")
)


def main_thread_place() -> str:
    """Return where the main thread is: function of hpcaccum, and line of the program.

    The programs of hpcaccum count as programs.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    function = ""
    while frame is not None:
        code = frame.f_code
        if not _is_library(code.co_filename):
            line = f"{Path(code.co_filename).name}:{frame.f_lineno}"
            return f"{function or code.co_name} ({line})"
        if code.co_filename.startswith(_PACKAGE):
            function = code.co_name
        frame = frame.f_back
    return function


def _is_library(file: str) -> bool:
    """Whether a file is of hpcaccum, of Python, or of an installed package."""
    if file.startswith(_PACKAGE):
        return not file.startswith(_PROGRAMS)
    return file.startswith(("<", *_INSTALLED))
