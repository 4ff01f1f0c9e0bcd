// From the sum to the result of a take: the mean, its norm, the clipped mean.
#include "common.cuh"

// out = f(sum); out may be sum.
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

// out = sum / weight, where weight is the sum of the weights of the gradients.
#define MEAN(name, T)                                              \
    KERNEL name(T *out, const T *sum, i64 n, double weight) {      \
        const T divisor = (T)weight;                               \
        map(out, sum, n, [=](T x) { return divide(x, divisor); }); \
    }
MEAN(mean_f32, float)
MEAN(mean_f64, double)

// The sum over the block's threads, always in the same order; valid in thread 0.
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

// Whether this block is the last of the grid to call, and so sees all that thread 0 of the
// other blocks wrote before.  All threads of the block must call.  (Pattern: CUDA C++
// Programming Guide, "Memory Fence Functions".)
__device__ __forceinline__ bool last_block(i64 *ticket) {
    bool last = false;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned long long *>(ticket), 1ull) == gridDim.x - 1;
        __threadfence();
        if (last) *ticket = 0;
    }
    return __syncthreads_or(last);
}

// The last block adds the partial sums of all blocks, always in the same order: the same
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

// out = the sum of squares, in float64.  partial has an element per block; ticket is 0
// before and after.
#define SQUARE_NORM(name, T)                                                       \
    KERNEL name(const T *x, i64 n, double *partial, i64 *ticket, double *out) {    \
        square_norm(x, n, partial, ticket, out);                                   \
    }
SQUARE_NORM(square_norm_f32, float)
SQUARE_NORM(square_norm_f64, double)
SQUARE_NORM(square_norm_f16, f16)
SQUARE_NORM(square_norm_bf16, bf16)

// out = mean * min(1, clip / norm of the mean), where mean = sum / weight and square_norm is
// the squared norm of the sum.  If the norm is NaN, so are all elements of the result.
#define MEAN_CLIP(name, T)                                                                          \
    KERNEL name(T *out, const T *sum, i64 n, double weight, const double *square_norm, double clip) { \
        const double norm = __ddiv_rn(__dsqrt_rn(*square_norm), weight);                            \
        const T divisor = (T)weight, factor = norm <= clip ? (T)1 : (T)__ddiv_rn(clip, norm);       \
        map(out, sum, n, [=](T x) { return multiply(divide(x, divisor), factor); });                \
    }
MEAN_CLIP(mean_clip_f32, float)
MEAN_CLIP(mean_clip_f64, double)
