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
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
// A kernel file has no other variables: compiler.py renames their section, the scheduler
// fills it with 0xFF (NaN, -1) before each block and keeps one for each block in flight.
#define __shared__ static

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

// Returns whether any thread of the block votes.
bool barrier(bool vote, const char *at);
uint64_t warp_value(unsigned mask, uint64_t value, unsigned source_lane, const char *at);
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
#define __syncthreads_or(p) cpu_cuda::barrier(!!(p), CPU_CUDA_AT)

namespace cpu_cuda {

template <class T> T down(unsigned mask, T value, unsigned by, const char *at) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = warp_value(mask, bits, lane() + by < 32 ? lane() + by : lane(), at);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

}  // namespace cpu_cuda

#define __shfl_down_sync(mask, v, by) cpu_cuda::down(mask, v, by, CPU_CUDA_AT)

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
CPU_CUDA_UPDATE(atomicMax, old > value ? old : value)

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
inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
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
