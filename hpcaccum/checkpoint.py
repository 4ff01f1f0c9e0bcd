"""Checkpoints: the state of a job in files that survive its end.

A checkpoint is one file in the safetensors format: arrays are stored as such,
everything else as JSON in its header. Nothing is pickled, so reading a file runs no
code from it. A file is written under another name, synchronized with the disk, and
renamed: an interrupted `save` leaves the earlier checkpoints as they were. A checksum
reveals damaged files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcaccum.arguments import fitting, positive_count
from hpcaccum.device import copyto, is_device, to_host
from hpcaccum.dtypes import BFLOAT16, Array, check_unmasked
from hpcaccum.errors import CheckpointError, InvalidArgumentError
from hpcaccum.files import json_value

logger = logging.getLogger("hpcaccum")

# The format of the contents; readers refuse others.
_FORMAT = "hpcaccum checkpoint 1"
# In the JSON, a mapping of this key alone stands for an array.
_ARRAY = "array of hpcaccum"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"checkpoint-[0-9]+" + re.escape(_SUFFIX))
_DTYPES = {BFLOAT16, *map(np.dtype, "?bBhHiIlLefd")}
# Unlike its number, different from that of any process on any host and at any time.
_TOKEN = os.urandom(16).hex()
# The directories that this process has.
_taken: set[Path] = set()
# What reading contents raises that `save` does not write; NumPy lacks some types.
_DAMAGE = AttributeError, OverflowError, TypeError, ValueError


def save(
    directory: str | os.PathLike[str],
    state: Any = None,
    /,
    *,
    keep: int = 3,
    **objects: Any,
) -> Path:
    """Write a checkpoint to a directory; remove older ones.

    ``save("saved", optimizer=opt, epoch=3)`` writes a dictionary with the snapshot of
    an optimizer and a number. Not collective: call it on the rank that has the state,
    with a directory that no other rank uses. When it returns, the checkpoint is on the
    disk.

    A directory belongs to the last process that began to save to it, so that two runs
    do not mix their checkpoints: an earlier process can no longer save there. Within a
    process, a signal handler or another thread may save during a call.

    Args:
        directory: Created if necessary.
        state: Dictionaries with string keys, lists and tuples, of arrays (NumPy or
            CuPy; real numbers), numbers, strings, booleans and None; such as the
            `snapshot` of an optimizer or the state of a NumPy random generator. Tuples
            become lists, and NumPy scalars arrays.
        keep: How many checkpoints are kept, this one included.
        objects: Instead of ``state``, by name: optimizers and accumulators, whose
            `snapshot` is saved; Variables; or what a state contains.

    Returns:
        The file. Files are numbered; a larger number is that of a later call.

    Raises:
        InvalidArgumentError, TypeError: If ``state`` contains anything else.
        CheckpointError: If another process has begun to save to the directory since
            this one has, or the name of its file ``.owner`` is taken by something else.
            Its checkpoints are left as they are.
        OSError: If it cannot be written, as on a full disk. Earlier checkpoints stay.
    """
    keep = positive_count(keep, "keep")
    if objects:
        if state is not None:
            raise InvalidArgumentError("pass a state, or objects by name, not both")
        state = {name: _state_of(each) for name, each in objects.items()}
    arrays: dict[str, Array] = {}
    text = json.dumps(_described(state, "state", arrays))
    checksum = _checksum(text, arrays)
    header = {"format": _FORMAT, "state": text, "checksum": checksum}
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    _check_owner(place)
    path = _write(place, arrays, header)
    for earlier in files(place)[:-keep]:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            earlier.unlink()
    return path


def load(path: str | os.PathLike[str], /, **objects: Any) -> Any:
    """Read a checkpoint; restore objects from it.

    Every rank may read. Not collective, unless an object is an optimizer or an
    accumulator: its `restore` is collective, so all ranks must find the same
    checkpoint. If an optimizer needs the variables, or only the host rank sees the
    file, call `restore` instead.

    Args:
        path: A file, or a directory of which the latest checkpoint is read. If that is
            damaged, a warning is logged, and the previous one is read.
        objects: By the name with which they were saved: optimizers and accumulators,
            Variables, or arrays, which are overwritten.

    Returns:
        The state that was saved; None if the directory does not exist or has no
        checkpoint.

    Raises:
        CheckpointError: If the file, or every checkpoint of the directory, is damaged
            or was not written by `save`.
        InvalidArgumentError, TypeError: If it has no state of an object, or an array
            does not fit; no object is changed. Also what `restore` raises.
        OSError: If it cannot be read.
    """
    state = _newest(Path(path))
    if state is not None and objects:
        _restore(state, objects)
    return state


def _state_of(each: Any) -> Any:
    """Return what is saved of an object."""
    if hasattr(each, "snapshot"):
        return each.snapshot()
    # A `Variable` has one.
    return getattr(each, "value", each)


def _restore(state: Any, objects: Mapping[str, Any]) -> None:
    there = sorted(state) if isinstance(state, Mapping) else type(state).__name__
    for name in objects:
        if not isinstance(state, Mapping) or name not in state:
            raise InvalidArgumentError(
                f"the checkpoint has no {name!r}, it has {there}"
            )
    copies = [
        _to_copy(name, each, state[name])
        for name, each in objects.items()
        if not hasattr(each, "restore")
    ]
    for name, each in objects.items():
        if hasattr(each, "restore"):
            each.restore(state[name])
    for array, saved in copies:
        copyto(array, saved)


def _to_copy(name: str, each: Any, saved: Any) -> tuple[Array, Array]:
    """Return the array of an object that is no optimizer, and what to copy to it."""
    own = _state_of(each)
    if not isinstance(own, np.ndarray) and not is_device(own):
        raise TypeError(
            f"{name!r}, of type {type(each).__name__}, cannot be restored in place; "
            f"take it from what load returns"
        )
    check_unmasked(repr(name), own)
    array = fitting(f"saved {name!r}", saved, own)
    if own.dtype.kind in "iu" and array.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"saved {name!r} is an array of {array.dtype}, which cannot be copied to "
            f"one of {own.dtype}"
        )
    if isinstance(own, np.ndarray) and not own.flags.writeable:
        raise InvalidArgumentError(f"{name!r} is an array that cannot be written to")
    return own, array


def _newest(place: Path) -> Any:
    """Return the state of a file, or of the latest in a directory, if there is one."""
    if place.is_file() or (place.suffix == _SUFFIX and not place.is_dir()):
        return _read(place)
    damaged: list[CheckpointError] = []
    for file in reversed(files(place)):
        try:
            state = _read(file)
        except CheckpointError as error:
            damaged.append(error)
            continue
        except FileNotFoundError:
            if os.path.lexists(file):
                raise
            # Removed by a process that has saved since.
            return _newest(place)
        for each in damaged:
            logger.warning("%s; %s is used instead", each, file.name)
        return state
    if damaged:
        raise CheckpointError("; ".join(map(str, damaged)))
    return None


def files(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a directory, the latest last; it may be missing."""
    place = Path(directory)
    found = place.iterdir() if place.exists() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_number)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("checkpoint-"))


# Writing


def _described(value: Any, where: str, arrays: dict[str, Array]) -> Any:
    """Return a value as JSON has it; add its arrays to ``arrays``."""
    if isinstance(value, (np.ndarray, np.generic)) or is_device(value):
        return {_ARRAY: _added(value, where, arrays)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _ARRAY:
                raise TypeError(f"keys must be strings: {where} has {key!r}")
        return {
            key: _described(each, f"{where}.{key}", arrays)
            for key, each in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        return [
            _described(each, f"{where}[{number}]", arrays)
            for number, each in enumerate(value)
        ]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{where} has type {type(value).__name__}, which cannot be saved")


def _added(value: Any, where: str, arrays: dict[str, Array]) -> str:
    check_unmasked(where, value)
    array = np.ascontiguousarray(to_host(value)).reshape(np.shape(value))
    if array.dtype.newbyteorder("=") not in _DTYPES:
        raise InvalidArgumentError(
            f"{where} is an array of {array.dtype}, which cannot be saved; only real "
            f"numbers of up to 64 bits can"
        )
    # Also two arrays whose keys contain dots have different names.
    name = f"{len(arrays)}: {where}"
    arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return name


def _checksum(text: str, arrays: Mapping[str, Array]) -> str:
    total = zlib.crc32(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"crc32 {total:08x}"


def _write(place: Path, arrays: Mapping[str, Array], header: dict[str, str]) -> Path:
    # Here, so that all but checkpoints works without it.
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    folder = None
    try:
        folder, path = _new(place)
        part = folder / path.name
        try:
            save_file(dict(arrays), part, header)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from None
        # safetensors makes it private; the folder has what the user's umask permits.
        part.chmod(folder.stat().st_mode & 0o666)
        _synchronize(part)
        _check_owner(place)
        part.replace(path)
        _synchronize(place)
    except OSError:
        # The folder is gone if another process has taken the directory meanwhile.
        _check_owner(place)
        raise
    finally:
        if folder is not None:
            _remove(folder)
    return path


def _new(place: Path) -> tuple[Path, Path]:
    """Return the file of a new checkpoint, and a folder in which to write it."""
    number = max(map(_number, files(place)), default=0)
    while True:
        number += 1
        folder = place / f".unfinished-{_TOKEN}-{number}"
        path = place / f"checkpoint-{number}{_SUFFIX}"
        try:
            folder.mkdir()
        except FileExistsError:
            # A signal handler or another thread has saved meanwhile.
            continue
        if not path.exists():
            return folder, path
        folder.rmdir()


def _remove(folder: Path) -> None:
    # Imported here, as it is slow.
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _synchronize(path: Path) -> None:
    """Bring a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The owner of a directory: the last process that began to save to it. Two jobs may have
# one directory: by mistake, or because a job was queued again while ranks of its
# earlier run still live. So that their checkpoints do not mix, each writes its name to
# the file ``.owner`` when it begins to save, and reads it before each later save.
# Renaming is atomic also on network file systems; locks are unreliable.


def take(directory: Path) -> None:
    """Let this process own a directory; remove what others have left unfinished."""
    name = f"process {os.getpid()} on {os.uname().nodename}"
    if job := os.environ.get("SLURM_JOB_ID"):
        name += f", job {job}"
    # A signal handler or another thread may do so at the same time.
    new = directory / f".owner-{os.urandom(16).hex()}"
    try:
        new.write_text(f"{_TOKEN}\n{name}\n")
        new.replace(directory / ".owner")
    finally:
        new.unlink(missing_ok=True)
    _taken.add(directory.resolve())
    for path in directory.glob(".unfinished-*"):
        if _TOKEN not in path.name:
            _remove(path)


def _check_owner(directory: Path) -> None:
    """Take a directory for the first time; later, raise if another process has it."""
    path = directory / ".owner"
    if os.path.lexists(path) and not path.is_file():
        raise CheckpointError(f"{path} is not a file of hpcaccum: remove it")
    text = path.read_text(errors="replace") if path.exists() else ""
    token, _, owner = text.partition("\n")
    if not token or directory.resolve() not in _taken:
        take(directory)
    elif token != _TOKEN:
        raise CheckpointError(
            f"{directory}: another run saves here now ({owner.strip()}, since "
            f"{time.ctime(path.stat().st_mtime)}); this one must stop, or their "
            f"checkpoints would mix"
        )


# Reading


def _read(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    # Opening a pipe would wait until another process writes to it.
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(
            f"{path} is not a checkpoint of hpcaccum: it is not a regular file"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("format") != _FORMAT:
                raise CheckpointError(
                    f"{path} is not a checkpoint of hpcaccum: its format is "
                    f"{header.get('format')!r:.99}, and not {_FORMAT!r}"
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _checksum(header["state"], arrays) != header["checksum"]:
                raise CheckpointError(f"{path} is damaged: its checksum is wrong")
            for name, array in arrays.items():
                if array.dtype not in _DTYPES:
                    raise TypeError(f"{name!r} is an array of {array.dtype}")
        return _restored(json_value(header["state"]), arrays)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path} is damaged: it has no {error!s:.99}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is damaged: it is nested too deeply") from None
    except (SafetensorError, *_DAMAGE) as error:
        raise CheckpointError(f"{path} is damaged: {error!s:.99}") from None


def _restored(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return arrays[value[_ARRAY]]
        return {key: _restored(each, arrays) for key, each in value.items()}
    if isinstance(value, list):
        return [_restored(each, arrays) for each in value]
    return value
