"""Checks of the arrays that a caller passes to a reducer, by name."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcaccum.arguments import converted, fitting
from hpcaccum.device import all_on_device, is_device
from hpcaccum.dtypes import FLOATS, Array, check_unmasked
from hpcaccum.errors import InvalidArgumentError
from hpcaccum.overlap import sharing


class Inputs:
    """Checks the inputs and targets of a call. A set of names is an int of bits.

    ``arrays`` are the reducer's own; `all` is the set of their names. ``results`` is
    the flat memory of its results. ``device_only`` names the schedule, if it reduces
    arrays on the device only.
    """

    def __init__(
        self,
        what: str,
        arrays: Mapping[str, Array],
        results: Array,
        device_only: str | None = None,
    ) -> None:
        self._device_only = device_only
        self._what, self._results, self._wide = what, results, results.dtype
        # Targets that share no memory with each other, nor with the results.
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
                f"{self._what}: no array is named {name!r}, the names are "
                f"{', '.join(map(repr, self._known))}"
            ) from None

    def names(self, members: int) -> list[str]:
        """Return the names of a set."""
        known = self._known.items()
        return [name for name, (_, _, _, bit) in known if members & bit]

    def in_place(self) -> int:
        """Return the set of all names, for inputs that are the reducer's own arrays."""
        if self._device_only is not None:
            self._refuse_host(next(iter(self._known), ""))
        return self.all

    def _refuse_host(self, name: str) -> None:
        raise InvalidArgumentError(
            f"{self._what}: schedule {self._device_only!r} reduces arrays on the "
            f"device only, {name!r} is in CPU memory; cupy.asarray copies it"
        )

    def check(
        self, arrays: Mapping[str, Any], started: int
    ) -> tuple[dict[str, Array], int]:
        """Return the inputs to copy in, and the set of all their names."""
        found, members, plain = {}, 0, True
        for name, given in arrays.items():
            own, shape, dtype, bit = self._own(name)
            if started & bit:
                raise InvalidArgumentError(
                    f"{self._what}: {name!r} has already been started"
                )
            members |= bit
            if self._device_only is not None and not is_device(given):
                self._refuse_host(name)
            if given is own:
                continue
            # The usual case; the full check takes microseconds.
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
        """Check the arrays that results are copied to, and return them."""
        plain = True
        for name, array in out.items():
            own, shape, _, bit = self._own(name)
            what = f"{self._what}: out {name!r}"
            if not members & bit:
                raise InvalidArgumentError(f"{what}: it is not an array of this call")
            if is_device(array):
                plain = False
                fitting(what, array, own)
                continue
            if not isinstance(array, np.ndarray) or not array.flags.writeable:
                raise InvalidArgumentError(f"{what} must be a writable array")
            check_unmasked(what, array)
            if array.dtype not in FLOATS:
                raise InvalidArgumentError(
                    f"{what} must be of floats in native byte order, got {array.dtype}"
                )
            if array.shape != shape:
                fitting(what, array, own)
        if not plain:
            all_on_device(f"{self._what}: out", out.values())
        self._check_apart(out)
        return out

    def _check_apart(self, out: Mapping[str, Array]) -> None:
        """Refuse targets that share memory with each other or with the results."""
        # Most callers pass the same targets in each call, and a check takes a
        # microsecond each.
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
                f"pass other arrays, or none and read the results in place"
            )
        if found is not None:
            raise InvalidArgumentError(
                f"{self._what}: out {found[0]!r} and {found[1]!r} share memory"
            )
        self._apart = {name: weakref.ref(array) for name, array in out.items()}

    def free(self) -> None:
        """Release the memory."""
        self._known, self._results = {}, np.empty(0)

    def exact(self, out: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the targets that a schedule copies to; there is at least one."""
        if is_device(next(iter(out.values()))):
            return out
        return {n: array for n, array in out.items() if array.dtype is self._wide}
