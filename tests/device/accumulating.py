"""What tests of the DeviceAccumulator share."""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np

import hpcaccum as hpc

INVALID = hpc.InvalidArgumentError
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALL = ["float16", BFLOAT16, "float32", "float64"]
WAIT = 60.0


def like(form, values, dtype="float64"):
    """Put values on the device; by name also their negatives."""
    values = np.asarray(values, dtype)
    one = cupy.asarray(values)
    if form == "one":
        return one
    none = cupy.zeros((0, 3), dtype)
    return {"weight": one, "none": none, "bias": cupy.asarray(-values)}


def same_bits(form, result, values):
    """Fail unless a result is `like` these values, bit for bit."""
    values = np.asarray(values)
    found = {"weight": result} if form == "one" else result
    wanted_of = {"weight": values, "bias": -values, "none": np.zeros((0, 3))}
    for name, array in found.items():
        wanted, actual = wanted_of[name].astype(values.dtype), array.get()
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        # NumPy takes no NaN of bfloat16 for equal.
        values_of = np.float64(actual), np.float64(wanted)
        np.testing.assert_array_equal(*values_of)
        signs = [np.signbit(each[~np.isnan(each)]) for each in values_of]
        np.testing.assert_array_equal(*signs)
