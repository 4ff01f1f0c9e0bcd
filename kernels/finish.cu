// From the sum to what the optimizer takes: the mean, its norm, the clipped mean.
//
// The count stays on the device, and taking the mean begins the next step there.
#include "common.cuh"

// out = f(sum), which may be the same array.
template <class T, class F> __device__ __forceinline__ void map(T *out, const T *sum, i64 n, F f) {
    constexpr int V = Width<T, T>::value;
    auto get = [=](i64 i, auto size) { return load<decltype(size)::value>(sum + i); };
    auto put = [=](i64 i, auto held, auto size) {
#pragma unroll
        for (int j = 0; j < decltype(size)::value; j++) held.at[j] = f(held.at[j]);
        store(out + i, held);
    };
    // Divisions in float64 take many registers.
    constexpr int DEPTH = sizeof(T) == 8 ? 2 : 4;
    stream<V, DEPTH>(grid_thread(), grid_threads(), n, aligned<V>(out) && aligned<V>(sum), get, put);
}

// out = sum / count, or the sum itself; then the next step begins.
#define MEAN(name, T)                                                            \
    KERNEL name(T *out, const T *sum, i64 n, i64 *header, int divide_by_count) { \
        const T count = divide_by_count ? (T)header[COUNT] : (T)1;               \
        map(out, sum, n, [=](T x) { return divide(x, count); });                 \
        next_step(header);                                                       \
    }
MEAN(mean_f32, float)
MEAN(mean_f64, double)

// The sum over the block's threads, in an order that never changes; valid in thread 0.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int d = 16; d; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    if (warp != 0) return 0;
    x = lane < THREADS / 32 ? of_warp[lane] : 0;
    for (int d = 16; d; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
    return x;
}

// Whichever block ends last adds what the blocks left, always in the same order: the same
// bits each time, which atomics on a float would not give.
template <class T>
__device__ __forceinline__ void square_norm(const T *x, i64 n, double *partial, i64 *ticket, double *out) {
    constexpr int V = Width<T, T>::value;
    double total = 0;
    auto get = [=](i64 i, auto size) { return load<decltype(size)::value>(x + i); };
    auto put = [&](i64, auto held, auto size) {
#pragma unroll
        for (int j = 0; j < decltype(size)::value; j++) {
            const double value = widen(held.at[j]);
            total = multiply_add(value, value, total);
        }
    };
    stream<V, 4>(grid_thread(), grid_threads(), n, aligned<V>(x), get, put);
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
    if (!last_block(ticket)) return;
    total = 0;
    for (i64 i = threadIdx.x; i < gridDim.x; i += THREADS) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *out = total;
}

// out = the sum of squares, in float64.  partial has an element a block.
#define SQUARE_NORM(name, T)                                                          \
    KERNEL name(const T *x, i64 n, double *partial, i64 *ticket, double *out) {    \
        square_norm(x, n, partial, ticket, out);                                      \
    }
SQUARE_NORM(square_norm_f32, float)
SQUARE_NORM(square_norm_f64, double)
SQUARE_NORM(square_norm_f16, f16)
SQUARE_NORM(square_norm_bf16, bf16)

// out = mean * min(1, clip / norm of the mean), given the squared norm of the sum; then the
// next step begins.  A norm that is NaN makes all of it NaN.
#define MEAN_CLIP(name, T)                                                                       \
    KERNEL name(T *out, const T *sum, i64 n, const double *square_norm, i64 *header,          \
                   double clip, int divide_by_count) {                                           \
        const i64 count = divide_by_count ? header[COUNT] : 1;                                   \
        const double norm = __ddiv_rn(__dsqrt_rn(*square_norm), (double)count);                  \
        const T factor = norm <= clip ? (T)1 : (T)__ddiv_rn(clip, norm);                         \
        map(out, sum, n, [=](T x) { return multiply(divide(x, (T)count), factor); });            \
        next_step(header);                                                                       \
    }
MEAN_CLIP(mean_clip_f32, float)
MEAN_CLIP(mean_clip_f64, double)
