"""DLPack capsules that say that the memory is a CUDA device's, as CuPy's do.

NumPy makes and reads them; the device is written in, or that of NumPy.

Source: the DLPack specification, dlpack.h.
"""

from __future__ import annotations

import ctypes

import numpy as np

_CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA
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
    _set_device(tensor, CUDA, memory.device_id)
    if bfloat:
        ctypes.c_uint8.from_address(tensor + _DTYPE).value = _BFLOAT
    return made


def _set_device(tensor, kind, number):
    where = (ctypes.c_int32 * 2).from_address(tensor + _DEVICE)
    where[0], where[1] = kind, number


class _OfTheHost:
    """What NumPy takes an array from."""

    def __init__(self, made):
        self._made = made

    def __dlpack_device__(self):
        return _CPU, 0

    def __dlpack__(self, **options):
        return self._made


def host_array(made):
    """Return a NumPy array of the memory of a capsule without a version."""
    _set_device(_pointer(made, b"dltensor"), _CPU, 0)
    return np.from_dlpack(_OfTheHost(made))
