"""DLPack capsules that say that the memory is a CUDA device's, as CuPy's do.

NumPy makes them; then the device is written in.

Source: the DLPack specification, dlpack.h.
"""

from __future__ import annotations

import ctypes

import numpy as np

CUDA = 2  # kDLCUDA
_BFLOAT = 4  # kDLBfloat

# Within a tensor, after the address; within a versioned one, the tensor.
_DEVICE, _DTYPE, _TENSOR = 8, 20, 32

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Kept:
    """Memory that stays for as long as NumPy knows of it."""

    def __init__(self, host, memory):
        self.__array_interface__ = host.__array_interface__
        self._memory = memory


def capsule(host, memory, max_version):
    """Return a capsule, versioned if that is understood.

    Raises:
        TypeError: If it should be versioned and this NumPy cannot; callers then ask
            for one without.
    """
    bfloat = host.dtype.name == "bfloat16"
    plain = host.view(np.uint16) if bfloat else host
    array = np.asarray(_Kept(plain, memory))
    if max_version is not None and max_version >= (1, 0):
        made = array.__dlpack__(max_version=max_version)
        tensor = _pointer(made, b"dltensor_versioned") + _TENSOR
    else:
        made = array.__dlpack__()
        tensor = _pointer(made, b"dltensor")
    where = (ctypes.c_int32 * 2).from_address(tensor + _DEVICE)
    where[0], where[1] = CUDA, memory.device_id
    if bfloat:
        ctypes.c_uint8.from_address(tensor + _DTYPE).value = _BFLOAT
    return made
