"""The data set, scikit-learn's digits or a file, and the batches of each rank."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcaccum import Group, InvalidArgumentError
from hpcaccum.dtypes import Array

# One in five samples of each class is a test sample.
_TEST_SHARE = 5


@dataclass(frozen=True)
class Dataset:
    """Samples to train with and to test with.

    Each feature of `x` has mean 0 and deviation 1. By `scaling` it was scaled: ``mean``
    and ``deviation`` (features,), and ``labels``, that of each class number of `y`.
    """

    name: str
    x: Array
    y: Array
    x_test: Array
    y_test: Array
    scaling: dict[str, Array]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.scaling["labels"])


def load(path: Path | None, group: Group) -> Dataset:
    """Return the data on every rank. Collective.

    Rank 0 reads and broadcasts: the file need not be visible on every node, and
    importing scikit-learn takes longer than the training.
    """

    def read() -> Dataset | None:
        if group.rank != 0:
            return None
        data = _digits() if path is None else _read(path)
        if len(data.y) < group.size:
            raise InvalidArgumentError(
                f"{data.name}: {len(data.y)} samples, too few for {group.size} ranks"
            )
        return data

    data: Dataset = group.comm.bcast(group.agree("data", read, lambda _: {}), 0)
    return data


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InvalidArgumentError(
            "scikit-learn, which provides the digits, is missing: pip install "
            "scikit-learn matplotlib"
        ) from None
    x, y = load_digits(return_X_y=True)
    return prepare("digits", {"x": x, "y": y})


def _read(path: Path) -> Dataset:
    try:
        path.stat()
        if not zipfile.is_zipfile(path):
            raise InvalidArgumentError("is not an .npz file")
        with np.load(path, allow_pickle=False) as file:
            return prepare(path.name, file)
    except OSError as error:
        message = error.strerror or str(error)
    except Exception as error:
        # NumPy, zipfile and zlib raise many types.
        message = str(error)
    raise InvalidArgumentError(f"--data {path}: {' '.join(message.split())}")


def prepare(name: str, arrays: Mapping[str, Array]) -> Dataset:
    """Check the arrays, split off test samples if needed, scale the features."""
    if not {"x", "y"} <= {*arrays}:
        raise InvalidArgumentError(
            f"must have arrays x and y, has {sorted(arrays) or 'none'}"
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise InvalidArgumentError("has only one of x_test and y_test")
    x, y = arrays["x"], arrays["y"]
    _check(x, y, "")
    if "x_test" in arrays:
        x_test, y_test = arrays["x_test"], arrays["y_test"]
    else:
        chosen = _every_fifth(y)
        x_test, y_test, x, y = x[chosen], y[chosen], x[~chosen], y[~chosen]
    _check(x_test, y_test, "_test")
    if x_test.shape[1] != x.shape[1]:
        raise InvalidArgumentError(
            f"x has {x.shape[1]} features, x_test has {x_test.shape[1]}"
        )
    labels = np.unique(np.concatenate([y, y_test]))
    if len(labels) < 2:
        raise InvalidArgumentError(f"y must have at least 2 classes, has {len(labels)}")
    mean, deviation = x.mean(0, dtype=np.float64), x.std(0, dtype=np.float64)
    deviation[deviation == 0] = 1
    x, x_test = (((each - mean) / deviation).astype("f4") for each in (x, x_test))
    y, y_test = (np.searchsorted(labels, each) for each in (y, y_test))
    scaling = {"mean": mean, "deviation": deviation, "labels": labels}
    return Dataset(name, x, y, x_test, y_test, scaling)


def _check(x: Array, y: Array, suffix: str) -> None:
    if x.ndim != 2 or x.dtype.kind not in "fiub" or x.size == 0:
        raise InvalidArgumentError(
            f"x{suffix} must be numbers (n, features), got {x.dtype} {x.shape}"
        )
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"y{suffix} must be integers ({len(x)},), got {y.dtype} {y.shape}"
        )
    if not np.isfinite(x).all():
        number = np.count_nonzero(~np.isfinite(x))
        raise InvalidArgumentError(f"x{suffix} has {number} values that are not finite")


def _every_fifth(y: Array) -> Array:
    """Return a mask of the test samples: the last of every five of a class."""
    chosen = np.zeros(len(y), bool)
    for label in np.unique(y):
        chosen[np.flatnonzero(y == label)[_TEST_SHARE - 1 :: _TEST_SHARE]] = True
    if not chosen.any():
        raise InvalidArgumentError(
            f"has fewer than {_TEST_SHARE} samples of each class, none to test with; "
            "add x_test and y_test"
        )
    return chosen


def batches(
    data: Dataset, batch: int, rank: int, ranks: int, seed: int, start: int = 0
) -> Iterator[tuple[Array, Array]]:
    """Yield a rank's batches without end, from number ``start`` on: rows and labels.

    In every epoch all ranks shuffle the training set identically and each takes every
    ``ranks``-th sample: an epoch of all ranks contains each sample once, and over many
    epochs each rank sees all samples. Each rank goes through its epochs independently.
    """
    own = len(range(rank, len(data.y), ranks))
    epoch, begin = divmod(start * batch, own)
    rest = np.empty(0, np.int64)
    while True:
        while len(rest) < batch:
            order = np.random.default_rng([seed, epoch]).permutation(len(data.y))
            rest = np.concatenate([rest, order[rank::ranks][begin:]])
            epoch, begin = epoch + 1, 0
        now, rest = rest[:batch], rest[batch:]
        yield data.x[now], data.y[now]
