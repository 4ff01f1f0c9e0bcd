// Gradients as int8 with a scale for each group of 1024, what is lost kept for next time.
//
// Error feedback: e = gradient + residual is sent as q * scale, and residual = e - q * scale
// joins the next gradient.  (Seide et al., "1-Bit Stochastic Gradient Descent", 2014;
// Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.)  Two warps keep a group in
// their registers from its largest element to its residual: one pass over memory.
#include "common.cuh"

#define GROUP 1024                        // elements that share a scale
#define TEAM 64                           // threads for a group
#define TEAMS (THREADS / TEAM)
#define VECTOR 4                          // elements a thread moves at once
#define ROUNDS (GROUP / (TEAM * VECTOR))  // of a thread
#define LARGEST 3.402823466e38f
#define INFINITE __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

// Where in its group a thread's elements lie: side by side if they move as vectors, else so
// that neighbours touch neighbours.
template <bool VECTORS> __device__ __forceinline__ int place(int round, int j) {
    const int member = threadIdx.x % TEAM;
    return round * TEAM * VECTOR + (VECTORS ? member * VECTOR + j : j * TEAM + member);
}

// e = gradient + residual; what lies past the end counts as 0.
template <bool VECTORS, class T>
__device__ __forceinline__ void gather(float *e, const T *gradient, const float *residual, i64 n) {
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        Vec<T, VECTOR> g;
        Vec<float, VECTOR> old;
        if (VECTORS) {
            g = load<VECTOR>(gradient + place<true>(r, 0));
            old = load<VECTOR>(residual + place<true>(r, 0));
        }
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const int i = place<VECTORS>(r, j);
            float &sum = e[r * VECTOR + j];
            if (VECTORS) sum = __fadd_rn(widen(g.at[j]), old.at[j]);
            else sum = i < n ? __fadd_rn(widen(gradient[i]), residual[i]) : 0.0f;
        }
    }
}

// Write q and what is left of e.  Without a usable scale q is 0: of a group of zeros nothing
// is left, of one that is not finite nothing can be kept.
template <bool VECTORS>
__device__ __forceinline__ void scatter(const float *e, float scale, float *residual, signed char *q, i64 n) {
    const bool finite = scale <= LARGEST;
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        Vec<float, VECTOR> left;
        Vec<signed char, VECTOR> sent;
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            const float x = e[r * VECTOR + j];
            const int rounded = scale > 0 ? __float2int_rn(__fdiv_rn(x, scale)) : 0;
            const int value = min(127, max(-127, rounded));
            left.at[j] = finite ? __fmaf_rn(-scale, (float)value, x) : 0.0f;
            sent.at[j] = (signed char)value;
            const int i = place<VECTORS>(r, j);
            if (!VECTORS && i < n) residual[i] = left.at[j], q[i] = sent.at[j];
        }
        if (!VECTORS) continue;
        store(residual + place<true>(r, 0), left);
        store(q + place<true>(r, 0), sent);
    }
}

// The largest |e| of the group, infinite if one is not finite.  All threads of the block
// must call, and give another `of_warp` the next time: the last one is still being read.
__device__ __forceinline__ float largest(const float *e, float *of_warp) {
    float most = 0;
#pragma unroll
    for (int k = 0; k < ROUNDS * VECTOR; k++)
        most = fmaxf(most, fabsf(e[k]) <= LARGEST ? fabsf(e[k]) : INFINITE);
    for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) of_warp[warp] = most;
    __syncthreads();
    return fmaxf(most, of_warp[warp ^ 1]);
}

template <bool VECTORS, class T>
__device__ __forceinline__ float compress_group(const T *gradient, float *residual, signed char *q, i64 n,
                                                float *of_warp) {
    float e[ROUNDS * VECTOR];
    gather<VECTORS>(e, gradient, residual, n);
    const float most = largest(e, of_warp);
    const float scale = most <= LARGEST ? __fdiv_rn(most, 127.0f) : NOT_A_NUMBER;
    scatter<VECTORS>(e, scale, residual, q, n);
    return scale;
}

template <class T>
__device__ __forceinline__ void compress(const T *gradient, float *residual, signed char *q, float *scales, i64 n) {
    __shared__ float of_warp[2][THREADS / 32];
    const bool all = aligned<VECTOR>(gradient) && aligned<VECTOR>(residual) && aligned<VECTOR>(q);
    int turn = 0;
    // The whole block goes round together, as its barrier wants; so it looks at the last
    // group it has to see whether vectors will do.
    for (i64 first = (i64)blockIdx.x * TEAMS; first * GROUP < n; first += (i64)gridDim.x * TEAMS) {
        const i64 group = first + threadIdx.x / TEAM, i = group * GROUP;
        const float scale = all && (first + TEAMS) * GROUP <= n
            ? compress_group<true>(gradient + i, residual + i, q + i, n - i, of_warp[turn])
            : compress_group<false>(gradient + i, residual + i, q + i, n - i, of_warp[turn]);
        if (threadIdx.x % TEAM == 0 && i < n) scales[group] = scale;
        turn = 1 - turn;
    }
}

// n elements; scales has one for each group begun.
#define COMPRESS(name, T)                                                                       \
    KERNEL name(const T *gradient, float *residual, signed char *q, float *scales, i64 n) {     \
        compress(gradient, residual, q, scales, n);                                             \
    }
COMPRESS(compress_int8_f32, float)
COMPRESS(compress_int8_f16, f16)
COMPRESS(compress_int8_bf16, bf16)

// sum = (scale * scales) * q + sum, or without the sum for the first gradient.
template <bool FIRST>
__device__ __forceinline__ void add_int8(float *sum, const signed char *q, const float *scales, float scale, i64 n) {
    auto get = [=](i64 i, auto size) {
        constexpr int N = decltype(size)::value;
        Addends<float, signed char, N> both;
        if (!FIRST) both.sum = load<N>(sum + i);
        both.gradient = load<N>(q + i);
        return both;
    };
    auto put = [=](i64 i, auto both, auto size) {
        constexpr int N = decltype(size)::value;
        const float factor = __fmul_rn(scale, scales[i / GROUP]);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float x = (float)both.gradient.at[j];
            both.sum.at[j] = FIRST ? __fmul_rn(factor, x) : __fmaf_rn(factor, x, both.sum.at[j]);
        }
        store(sum + i, both.sum);
    };
    const bool vectors = aligned<VECTOR>(sum) && aligned<VECTOR>(q);
    stream<VECTOR, 2>(grid_thread(), grid_threads(), n, vectors, get, put);
}

// Decompressed and added in one pass; header and met may be null.
KERNEL accumulate_int8_f32(float *sum, const signed char *q, const float *scales, float scale, i64 n,
                              i64 *header, i64 local_step, i64 *met) {
    const Admission admission(header, local_step);
    if (admission.fresh()) {
        if (admission.first()) add_int8<true>(sum, q, scales, scale, n);
        else add_int8<false>(sum, q, scales, scale, n);
    }
    admission.close(met);
}
