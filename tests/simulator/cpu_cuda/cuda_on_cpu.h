// CUDA C as g++ sees it: included before a kernel file, so that its own text runs on the CPU.
//
// A CUDA thread is a fiber: scheduler.cpp runs them in random order and changes between
// them where CUDA threads meet (barriers, warp operations) or see each other (atomics,
// fences).  CUDA's own headers supply the vector types and the arithmetic of float16 and
// bfloat16, so that rounding is CUDA's.  It shows what a kernel computes, never how fast.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#define CUDA_ON_CPU 1

// ---- keywords ------------------------------------------------------------------------
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// A kernel file has no other variables: compiler.py renames their section, the scheduler
// fills it with 0xFF (NaN, -1) before each block and keeps one for each block in flight.
#define __shared__ static
#define warpSize 32

namespace cpu_cuda {

// What a thread reads about itself.
struct Place {
    uint3 thread, block;
    dim3 block_size, grid_size;
};
extern Place place;

// Where in the kernel's source a call stands.
#define CPU_CUDA_TEXT_(x) #x
#define CPU_CUDA_TEXT(x) CPU_CUDA_TEXT_(x)
#define CPU_CUDA_AT __FILE__ ":" CPU_CUDA_TEXT(__LINE__)

struct Votes {
    int count, all;
};
Votes barrier(bool vote, const char *at);
uint64_t warp_value(unsigned mask, uint64_t value, unsigned source_lane, const char *at);
unsigned warp_ballot(unsigned mask, bool vote, const char *at);
unsigned lane();
void fence();
// Called before an atomic: others may run now, then not until it is done.
void atomic(const void *address, size_t size, void *code);

}  // namespace cpu_cuda

#define threadIdx cpu_cuda::place.thread
#define blockIdx cpu_cuda::place.block
#define blockDim cpu_cuda::place.block_size
#define gridDim cpu_cuda::place.grid_size

// ---- barriers and warps --------------------------------------------------------------
#define __syncthreads() ((void)cpu_cuda::barrier(false, CPU_CUDA_AT))
#define __syncthreads_count(p) (cpu_cuda::barrier(!!(p), CPU_CUDA_AT).count)
#define __syncthreads_or(p) (cpu_cuda::barrier(!!(p), CPU_CUDA_AT).count != 0)
#define __syncthreads_and(p) (cpu_cuda::barrier(!!(p), CPU_CUDA_AT).all)
#define __ballot_sync(mask, p) cpu_cuda::warp_ballot(mask, !!(p), CPU_CUDA_AT)
#define __any_sync(mask, p) (__ballot_sync(mask, p) != 0)
#define __all_sync(mask, p) (__ballot_sync(mask, !(p)) == 0)
#define __syncwarp() ((void)__ballot_sync(0xffffffffu, true))

namespace cpu_cuda {

template <class T> T exchange(unsigned mask, T value, unsigned source, const char *at) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = warp_value(mask, bits, source, at);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T> T down(unsigned mask, T value, unsigned by, const char *at) {
    return exchange(mask, value, lane() + by < 32 ? lane() + by : lane(), at);
}
template <class T> T up(unsigned mask, T value, unsigned by, const char *at) {
    return exchange(mask, value, lane() >= by ? lane() - by : lane(), at);
}

}  // namespace cpu_cuda

#define __shfl_sync(mask, v, from) cpu_cuda::exchange(mask, v, (from) & 31, CPU_CUDA_AT)
#define __shfl_xor_sync(mask, v, x) cpu_cuda::exchange(mask, v, cpu_cuda::lane() ^ (x), CPU_CUDA_AT)
#define __shfl_down_sync(mask, v, by) cpu_cuda::down(mask, v, by, CPU_CUDA_AT)
#define __shfl_up_sync(mask, v, by) cpu_cuda::up(mask, v, by, CPU_CUDA_AT)

// ---- memory --------------------------------------------------------------------------
inline void __threadfence() { cpu_cuda::fence(); }

// The race check must not take an atomic's own reads and writes for plain ones.
#define CPU_CUDA_ATOMIC __attribute__((no_sanitize_thread, noinline))
#define CPU_CUDA_UPDATE(name, result)                              \
    template <class T> CPU_CUDA_ATOMIC T name(T *at, T value) {    \
        cpu_cuda::atomic(at, sizeof(T), __builtin_return_address(0)); \
        T old = *at;                                               \
        *at = result;                                              \
        return old;                                                \
    }
CPU_CUDA_UPDATE(atomicAdd, old + value)
CPU_CUDA_UPDATE(atomicSub, old - value)
CPU_CUDA_UPDATE(atomicExch, value)
CPU_CUDA_UPDATE(atomicMax, old > value ? old : value)
CPU_CUDA_UPDATE(atomicMin, old < value ? old : value)
CPU_CUDA_UPDATE(atomicOr, old | value)
CPU_CUDA_UPDATE(atomicAnd, old &value)
template <class T> CPU_CUDA_ATOMIC T atomicCAS(T *at, T expected, T value) {
    cpu_cuda::atomic(at, sizeof(T), __builtin_return_address(0));
    T old = *at;
    if (old == expected) *at = value;
    return old;
}
template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcs(T *at, T value) { *at = value; }

// ---- arithmetic ----------------------------------------------------------------------
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)b : (C)a;
}

// ---- entry points --------------------------------------------------------------------
namespace cpu_cuda {

// A word per parameter: p pointer, f floating, i integer, s other; and its size.
template <class T> std::string kind() {
    char letter = std::is_pointer_v<T>          ? 'p'
                  : std::is_floating_point_v<T> ? 'f'
                  : std::is_integral_v<T>       ? 'i'
                                                : 's';
    return letter + std::to_string(sizeof(T)) + " ";
}
template <class... A> std::string kinds(void (*)(A...)) { return (kind<A>() + ... + ""); }

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}
template <class... A> void call(void (*kernel)(A...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace cpu_cuda

#define CPU_CUDA_VISIBLE extern "C" __attribute__((visibility("default")))
#define CPU_CUDA_KERNEL(name)                                              \
    CPU_CUDA_VISIBLE void cpu_cuda_parameters_##name(char *text, size_t size) { \
        std::snprintf(text, size, "%s", cpu_cuda::kinds(name).c_str());    \
    }                                                                      \
    CPU_CUDA_VISIBLE void cpu_cuda_call_##name(void **arguments) {         \
        cpu_cuda::call(name, arguments);                                   \
    }
