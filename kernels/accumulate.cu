// sum = scale * gradient + sum; the first gradient of a step overwrites the sum.
//
// Overwriting saves zeroing the sum and reading it.  Halves are added in float32, in the
// same pass.
#include "common.cuh"

// Arrays of n elements that do not overlap.
#define ACCUMULATE(name, TA, TI)                                                      \
    KERNEL name(TA *sum, const TI *gradient, TA scale, i64 n, int first) {            \
        if (first) add<true>(sum, gradient, scale, grid_thread(), grid_threads(), n); \
        else add<false>(sum, gradient, scale, grid_thread(), grid_threads(), n);      \
    }
ACCUMULATE(accumulate_f32, float, float)
ACCUMULATE(accumulate_f64, double, double)
ACCUMULATE(accumulate_f16, float, f16)
ACCUMULATE(accumulate_bf16, float, bf16)
