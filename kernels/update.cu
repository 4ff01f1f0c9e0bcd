// The optimizers' updates, each in one pass over value, gradient and slots.
//
// Every operation is rounded by itself, in the order of the NumPy line (rules.py): so
// the device computes the bits that the host would, but for subnormals.  CuPy's
// expressions would need a launch, and a pass over memory, for each operation.
#include "common.cuh"

__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double root(double a) { return __dsqrt_rn(a); }

template <class TV, class TA, int SLOTS, int N> struct Held {
    Vec<TV, N> value;
    Vec<TA, N> grad, slot[SLOTS + 1];
};

// value, slots = rule(value, gradient, slots).  The gradient may be the value's memory.
template <int SLOTS, class TV, class TA, class Rule>
__device__ __forceinline__ void update(TV *value, const TA *grad, TA *slot0, TA *slot1, i64 n, Rule rule) {
    constexpr int V = Width<TV, TA>::value;
    TA *const slots[] = {slot0, slot1};
    bool vectors = aligned<V>(value) && aligned<V>(grad);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) vectors = vectors && aligned<V>(slots[s]);
    stream<V, SLOTS ? 1 : 2>(
        grid_thread(), grid_threads(), n, vectors,
        [&](i64 i, auto size) {
            constexpr int N = decltype(size)::value;
            Held<TV, TA, SLOTS, N> held;
            held.value = load<N>(value + i);
            held.grad = load<N>(grad + i);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) held.slot[s] = load<N>(slots[s] + i);
            return held;
        },
        [&](i64 i, auto held, auto size) {
            constexpr int N = decltype(size)::value;
#pragma unroll
            for (int k = 0; k < N; k++) {
                TA state[2] = {held.slot[0].at[k], held.slot[SLOTS > 1].at[k]};
                TA next = rule((TA)widen(held.value.at[k]), held.grad.at[k], state[0], state[1]);
                held.value.at[k] = narrow<TV>(next);
#pragma unroll
                for (int s = 0; s < SLOTS; s++) held.slot[s].at[k] = state[s];
            }
            store<N>(value + i, held.value);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) store<N>(slots[s] + i, held.slot[s]);
        });
}

#define UPDATES(KIND, TV, TA)                                                                             \
    KERNEL sgd_##KIND(TV *value, const TA *grad, i64 n, TA rate) {                                        \
        update<0>(value, grad, (TA *)nullptr, (TA *)nullptr, n,                                           \
                  [=](TA x, TA g, TA &, TA &) { return minus(x, multiply(g, rate)); });                   \
    }                                                                                                     \
    KERNEL momentum_##KIND(TV *value, const TA *grad, TA *accum, i64 n, TA rate, TA momentum) {           \
        update<1>(value, grad, accum, (TA *)nullptr, n, [=](TA x, TA g, TA &a, TA &) {                    \
            a = plus(multiply(a, momentum), g);                                                           \
            return minus(x, multiply(a, rate));                                                           \
        });                                                                                               \
    }                                                                                                     \
    KERNEL nesterov_##KIND(TV *value, const TA *grad, TA *accum, i64 n, TA rate, TA momentum) {           \
        update<1>(value, grad, accum, (TA *)nullptr, n, [=](TA x, TA g, TA &a, TA &) {                    \
            a = plus(multiply(a, momentum), g);                                                           \
            return minus(x, multiply(plus(multiply(a, momentum), g), rate));                              \
        });                                                                                               \
    }                                                                                                     \
    KERNEL adagrad_##KIND(TV *value, const TA *grad, TA *accum, i64 n, TA rate) {                         \
        update<1>(value, grad, accum, (TA *)nullptr, n, [=](TA x, TA g, TA &a, TA &) {                    \
            a = plus(a, multiply(g, g));                                                                  \
            return minus(x, multiply(divide(g, root(a)), rate));                                          \
        });                                                                                               \
    }                                                                                                     \
    KERNEL adam_##KIND(TV *value, const TA *grad, TA *m, TA *v, i64 n, TA rate, TA decay, TA beta1,       \
                       TA rest1, TA beta2, TA rest2, TA epsilon) {                                        \
        update<2>(value, grad, m, v, n, [=](TA x, TA g, TA &m, TA &v) {                                   \
            m = plus(multiply(m, beta1), multiply(g, rest1));                                             \
            v = plus(multiply(v, beta2), multiply(multiply(g, g), rest2));                                \
            if (decay != 0) x = minus(x, multiply(x, decay));                                             \
            return minus(x, multiply(divide(m, plus(root(v), epsilon)), rate));                           \
        });                                                                                               \
    }

UPDATES(f32, float, float)
UPDATES(f64, double, double)
UPDATES(f16, f16, float)
UPDATES(bf16, bf16, float)
