"""What a caller may bring to a reducer and take from it, by name."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcaccum.arguments import converted, fitting
from hpcaccum.device import all_on_device, is_device
from hpcaccum.dtypes import FLOATS
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.overlap import sharing

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = np.ndarray[Any, Any]


class Inputs:
    """Checks the arrays of one call. A set of names is a number, with a bit for each.

    Args:
        what: Begins messages.
        arrays: The reducer's own, by name.
        results: Their memory, flat and of the wide dtype.

    Attributes:
        all: The set of all names.
    """

    def __init__(self, what: str, arrays: Mapping[str, Array], results: Array) -> None:
        self._what, self._results, self._wide = what, results, results.dtype
        # Targets that were found apart from each other and from the results.
        self._apart: dict[str, weakref.ref[Array]] = {}
        self._known = {
            name: (array, array.shape, array.dtype, 1 << number)
            for number, (name, array) in enumerate(arrays.items())
        }
        self.all = (1 << len(arrays)) - 1

    def _own(self, name: str) -> tuple[Array, tuple[int, ...], np.dtype[Any], int]:
        try:
            return self._known[name]
        except KeyError:
            raise InvalidArgumentError(
                f"{self._what}: no array is named {name!r}, there are "
                f"{', '.join(map(repr, self._known))}"
            ) from None

    def names(self, members: int) -> list[str]:
        """Return the names of a set."""
        known = self._known.items()
        return [name for name, (_, _, _, bit) in known if members & bit]

    def brought(
        self, arrays: Mapping[str, Any], started: int
    ) -> tuple[dict[str, Array], int]:
        """Return what is to be copied in, and the set of what is there then."""
        found, members, plain = {}, 0, True
        for name, given in arrays.items():
            own, shape, dtype, bit = self._own(name)
            if started & bit:
                raise InvalidArgumentError(
                    f"{self._what}: {name!r} was started already"
                )
            members |= bit
            if given is own:
                continue
            # The check of the usual case; the other one takes microseconds.
            fits = type(given) is np.ndarray and given.dtype is dtype
            if not fits or given.shape != shape:
                given = fitting(f"{self._what}: {name!r}", given, own)
                if is_device(given):
                    plain = False
                else:
                    given = converted(given, dtype)
            found[name] = given
        if not plain:
            all_on_device(self._what, arrays.values())
        return found, members

    def targets(self, out: Mapping[str, Array], members: int) -> Mapping[str, Array]:
        """Return where results are to be copied, checked."""
        plain = True
        for name, array in out.items():
            own, shape, _, bit = self._own(name)
            what = f"{self._what}: out {name!r}"
            if not members & bit:
                raise InvalidArgumentError(f"{what}: this call does not reduce it")
            if is_device(array):
                plain = False
                fitting(what, array, own)
                continue
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise InvalidArgumentError(f"{what} must be an array to write to")
            if array.dtype not in FLOATS:
                raise InvalidArgumentError(f"{what} must be of floats")
            if array.shape != shape:
                fitting(what, array, own)
        if not plain:
            all_on_device(f"{self._what}: out", out.values())
        self._check_apart(out)
        return out

    def _check_apart(self, out: Mapping[str, Array]) -> None:
        """Refuse targets that lie in each other or in the memory of results."""
        # Most callers have the same ones each time; to look takes a microsecond each.
        for name, array in out.items():
            known = self._apart.get(name)
            if known is None or known() is not array:
                break
        else:
            return
        every: dict[Any, Array] = {**out, None: self._results}
        found = sharing(every)
        if found is not None and None in found:
            name = next(each for each in found if each is not None)
            raise InvalidArgumentError(
                f"{self._what}: out {name!r} is the memory of this reducer's results; "
                f"pass other arrays, or none and read the results where they lie"
            )
        if found is not None:
            raise InvalidArgumentError(
                f"{self._what}: out {found[0]!r} and {found[1]!r} share memory"
            )
        self._apart = {name: weakref.ref(array) for name, array in out.items()}

    def free(self) -> None:
        """Let go of the memory."""
        self._known, self._results = {}, np.empty(0)

    def exact(self, out: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the targets to which a schedule copies results by itself.

        Those on the device, and those of the dtype of results.
        """
        return {
            name: array
            for name, array in out.items()
            if array.dtype is self._wide or is_device(array)
        }
