// Definitions that the kernels share: number types, 16-byte accesses, loops over elements.
//
// NVRTC, nvcc and the tests' build for the CPU compile this file.  So no header of the C++
// library is included, every function is a __device__ function, and rounding is explicit
// (__fmaf_rn, __fmul_rn) wherever a compiler could fuse or reorder.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef long long i64;
typedef __half f16;
typedef __nv_bfloat16 bf16;

// The numbers of dtypes in tables (device/tables.py).
enum { F32, F64, F16, BF16 };

#define THREADS 256
// The launch code starts 4 blocks per multiprocessor; that allows 64 registers per thread.
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 4)

// ---- numbers: halves are summed in float32 -------------------------------------------
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }

// Round once, to nearest even; values that are too large become infinite.
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
// N elements, moved by one access of at most 16 bytes.
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

// Elements that a thread moves at once: 16 bytes of the wider type.
template <class A, class B> struct Width {
    static constexpr int value = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));
};

// Call held = get(i, Size<N>) at DEPTH positions, so that as many loads are in flight; then
// put(i, held, Size<N>) at each.  Positions are begin, begin + step, ... in vectors of N.
template <int N, int DEPTH, class Get, class Put>
__device__ __forceinline__ void steps(i64 begin, i64 step, i64 end, Get get, Put put) {
    i64 i = begin;
    // More unrolling would only cost registers.
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

// This thread processes elements begin, begin + step, ... below n, V at a time if `vectors`.
template <int V, int DEPTH, class Get, class Put>
__device__ __forceinline__ void stream(i64 begin, i64 step, i64 n, bool vectors, Get get, Put put) {
    const i64 full = vectors ? n / V : 0;
    steps<V, DEPTH>(begin, step, full, get, put);
    steps<1, DEPTH>(full * V + begin, step, n, get, put);
}

__device__ __forceinline__ i64 grid_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 grid_threads() { return (i64)gridDim.x * blockDim.x; }

// sum = scale * gradient + sum, rounded once; or scale * gradient for the first gradient.
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
