// sum = scale * gradient + sum, if the device's own counters admit the gradient.
//
// A conditional accumulator whose step and count never come to the host: a stale gradient
// is dropped without a synchronization.  A first gradient overwrites the sum, which saves
// zeroing and reading it.  Halves are added in float32, in the same pass.
#include "common.cuh"

template <class TA, class TI>
__device__ __forceinline__ void accumulate(TA *sum, const TI *gradient, TA scale, i64 n, i64 *header,
                                           i64 local_step, i64 *met) {
    const Admission admission(header, local_step);
    if (admission.fresh()) {
        if (admission.first()) add<true>(sum, gradient, scale, grid_thread(), grid_threads(), n);
        else add<false>(sum, gradient, scale, grid_thread(), grid_threads(), n);
    }
    admission.close(met);
}

// Arrays of n elements that do not overlap; header and met may be null.
#define ACCUMULATE(name, TA, TI)                                                                \
    KERNEL name(TA *sum, const TI *gradient, TA scale, i64 n, i64 *header, i64 local_step,   \
                   i64 *met) {                                                                  \
        accumulate(sum, gradient, scale, n, header, local_step, met);                           \
    }
ACCUMULATE(accumulate_f32, float, float)
ACCUMULATE(accumulate_f64, double, double)
ACCUMULATE(accumulate_f16, float, f16)
ACCUMULATE(accumulate_bf16, float, bf16)
