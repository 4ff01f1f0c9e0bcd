"""Files of a command: outputs, checked before its work begins; inputs; JSON lines."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hpcaccum.errors import InvalidArgumentError


def check_apart(
    outputs: Mapping[str, Path | None], inputs: Mapping[str, Path | None]
) -> None:
    """Raise InvalidArgumentError if an output is another file of the call."""
    given = [(n, p) for n, p in {**inputs, **outputs}.items() if p is not None]
    for (other, theirs), (name, path) in itertools.combinations(given, 2):
        if name in outputs and _same(path, theirs):
            raise InvalidArgumentError(
                f"{name} {path} is the same file as {other} {theirs}"
            )


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        # samefile also finds hard links. Two outputs to /dev/null are no conflict.
        return one.samefile(other) and one.is_file()
    return os.path.realpath(one) == os.path.realpath(other)


def check_new(outputs: Mapping[str, Path | None]) -> None:
    """Raise InvalidArgumentError if an output would overwrite a file."""
    for name, path in outputs.items():
        with _one_line(name, path):
            if path is not None and path.is_file():
                raise InvalidArgumentError(
                    f"{name} {path}: the file exists; use --force to overwrite it"
                )


def check_writable(option: str, path: Path | None) -> None:
    """Raise InvalidArgumentError if a file cannot be written; do not create it."""
    with _one_line(option, path):
        # The reader of a pipe would take this for the end.
        if path is None or path.is_fifo():
            return
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()


def check_directory(option: str, path: Path) -> None:
    """Make a directory; raise InvalidArgumentError if files cannot be written to it."""
    # Imported here, as it is slow.
    import tempfile

    with _one_line(option, path):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


def open_output(
    option: str, path: Path | None, *, append: bool = False
) -> IO[str] | None:
    """Return a file, opened for writing and empty unless appended to; None for None."""
    if path is None:
        return None
    with _one_line(option, path):
        if append:
            return path.open("a")
        file = path.open("w")
        if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode) and not file.isatty():
            os.write(file.fileno(), b"\n")
            if path.is_file():
                os.ftruncate(file.fileno(), 0)
                os.lseek(file.fileno(), 0, os.SEEK_SET)
    return file


class JsonLines:
    """A file of JSON objects, a line each, flushed at once so that a crash loses none.

    ``option`` names the file in messages; without a ``path`` nothing is written.
    """

    def __init__(self, option: str, path: Path | None, *, append: bool = False) -> None:
        self._option, self._path = option, path
        self._file = open_output(option, path, append=append)

    def write(self, facts: Mapping[str, Any]) -> None:
        """Write one line; end the job if that fails."""
        if self._file:
            with ending_the_job(self._option, self._path):
                self._file.write(json.dumps(facts, default=str) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


@contextlib.contextmanager
def _one_line(option: str, path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = error.strerror or str(error)
        raise InvalidArgumentError(f"{option} {path}: {message}") from None


@contextlib.contextmanager
def ending_the_job(option: str, path: Path | None) -> Iterator[None]:
    """Turn an OSError of the file in the block into an exit with one line."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"{option} {path}: {error.strerror or error}") from None


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


def shipped(folder: str) -> Path:
    """Return a folder of the package that has no Python: its kernels, its scripts."""
    # In a checkout it is beside the package, in an installation inside it.
    here = Path(__file__).resolve().parent
    inside = here / folder
    return inside if inside.is_dir() else here.parent / folder
