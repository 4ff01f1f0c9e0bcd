// What the kernels share: number types, 16-byte accesses, the counters on the device.
//
// Taken by NVRTC, by nvcc and by the tests' build for the CPU: so no header of the C++
// library, __device__ on every function, and explicit rounding (__fmaf_rn, __fmul_rn)
// wherever a compiler could fuse or reorder.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long i64;
typedef __half f16;
typedef __nv_bfloat16 bf16;

#define THREADS 256
// 4 blocks a multiprocessor, which is what the launch code starts: 64 registers a thread.
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 4)

// ---- numbers: halves are summed in float32 -------------------------------------------
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }

// Round once, to nearest even; what is too large becomes infinity.
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ double narrow<double>(float x) { return x; }
template <> __device__ __forceinline__ f16 narrow<f16>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <class T> __device__ __forceinline__ T narrow(double x);
template <> __device__ __forceinline__ float narrow<float>(double x) { return (float)x; }
template <> __device__ __forceinline__ double narrow<double>(double x) { return x; }
template <> __device__ __forceinline__ f16 narrow<f16>(double x) { return __double2half(x); }
template <> __device__ __forceinline__ bf16 narrow<bf16>(double x) { return __double2bfloat16(x); }

__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float multiply_add(float a, float x, float y) { return __fmaf_rn(a, x, y); }
__device__ __forceinline__ double multiply_add(double a, double x, double y) { return __fma_rn(a, x, y); }
__device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }

// ---- memory --------------------------------------------------------------------------
// N elements that one access of at most 16 bytes moves.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T at[N];
};
template <int N, class T> __device__ __forceinline__ Vec<T, N> load(const T *p) {
    return *reinterpret_cast<const Vec<T, N> *>(p);
}
template <int N, class T> __device__ __forceinline__ void store(T *p, const Vec<T, N> &v) {
    *reinterpret_cast<Vec<T, N> *>(p) = v;
}
template <int N, class T> __device__ __forceinline__ bool aligned(const T *p) {
    return reinterpret_cast<unsigned long long>(p) % (sizeof(T) * N) == 0;
}
template <int N> struct Size {
    static constexpr int value = N;
};

// How many elements a thread moves at once: 16 bytes of the wider type.
template <class A, class B> struct Width {
    static constexpr int value = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
};

// held = get(i, Size<N>) for DEPTH places, so that as many loads are in flight, then
// put(i, held, Size<N>) for each; places are begin, begin + step, ... vectors of N elements.
template <int N, int DEPTH, class Get, class Put>
__device__ __forceinline__ void steps(i64 begin, i64 step, i64 end, Get get, Put put) {
    i64 i = begin;
    // More unrolling would only take registers.
#pragma unroll 1
    for (; i + (DEPTH - 1) * step < end; i += DEPTH * step) {
        decltype(get(i, Size<N>())) held[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) held[d] = get((i + d * step) * N, Size<N>());
#pragma unroll
        for (int d = 0; d < DEPTH; d++) put((i + d * step) * N, held[d], Size<N>());
    }
#pragma unroll 1
    for (; i < end; i += step) put(i * N, get(i * N, Size<N>()), Size<N>());
}
// Give elements begin, begin + step, ... below n to this thread, V at a time where
// `vectors` allows it.
template <int V, int DEPTH, class Get, class Put>
__device__ __forceinline__ void stream(i64 begin, i64 step, i64 n, bool vectors, Get get, Put put) {
    const i64 full = vectors ? n / V : 0;
    steps<V, DEPTH>(begin, step, full, get, put);
    steps<1, DEPTH>(full * V + begin, step, n, get, put);
}

__device__ __forceinline__ i64 grid_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 grid_threads() { return (i64)gridDim.x * blockDim.x; }

// sum = scale * gradient + sum, rounded once; or, for the first one, scale * gradient.
template <class TA, class TI, int N> struct Addends {
    Vec<TA, N> sum;
    Vec<TI, N> gradient;
};
template <bool FIRST, class TA, class TI>
__device__ __forceinline__ void add(TA *sum, const TI *gradient, TA scale, i64 begin, i64 step, i64 n) {
    constexpr int V = Width<TA, TI>::value;
    auto get = [=](i64 i, auto size) {
        constexpr int N = decltype(size)::value;
        Addends<TA, TI, N> both;
        if (!FIRST) both.sum = load<N>(sum + i);
        both.gradient = load<N>(gradient + i);
        return both;
    };
    auto put = [=](i64 i, auto both, auto size) {
        constexpr int N = decltype(size)::value;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const TA x = widen(both.gradient.at[j]);
            both.sum.at[j] = FIRST ? multiply(scale, x) : multiply_add(scale, x, both.sum.at[j]);
        }
        store(sum + i, both.sum);
    };
    stream<V, 4>(begin, step, n, aligned<V>(sum) && aligned<V>(gradient), get, put);
}

// ---- the accumulator's counters ------------------------------------------------------
// The header is read by every thread when a kernel begins, and written by one thread of
// the last block to end: when all others have read it.
enum { STEP, COUNT, ACCEPTED, DROPPED, TICKET, LAGS, MAX_LAG = 31 };

// Whether this block is the last of the grid to get here, which sees all that the others
// wrote before.  All threads of the block must call.  (Pattern: CUDA C++ Programming Guide,
// "Memory Fence Functions".)
__device__ __forceinline__ bool last_block(i64 *ticket) {
    bool last = false;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(reinterpret_cast<unsigned long long *>(ticket), 1ull) == gridDim.x - 1;
        __threadfence();
        if (last) *ticket = 0;
    }
    return __syncthreads_or(last);
}

// Whether a gradient computed at local_step may still be added.
struct Admission {
    i64 *header;
    i64 local_step, step, count;

    // Without a header everything is added.
    __device__ __forceinline__ Admission(i64 *header, i64 local_step)
        : header(header), local_step(local_step), step(header ? header[STEP] : local_step),
          count(header ? header[COUNT] : 1) {}
    __device__ __forceinline__ bool fresh() const { return local_step >= step; }
    // An empty sum is overwritten, so that nobody needs to zero it.
    __device__ __forceinline__ bool first() const { return count == 0; }

    // Count the gradient, once; all threads must call.
    __device__ __forceinline__ void close(i64 *met) const {
        if (!header || !last_block(header + TICKET) || threadIdx.x != 0) return;
        const i64 lag = max(0ll, min((i64)MAX_LAG, step - local_step));
        header[LAGS + lag] += 1;
        if (fresh()) {
            header[COUNT] = count + 1;
            header[ACCEPTED] += 1;
        } else {
            header[DROPPED] += 1;
        }
        if (met) *met = step;
    }
};

// The sum has been taken: the next step begins.  All threads must call.
__device__ __forceinline__ void next_step(i64 *header) {
    if (!header || !last_block(header + TICKET) || threadIdx.x != 0) return;
    header[COUNT] = 0;
    header[STEP] += 1;
}
