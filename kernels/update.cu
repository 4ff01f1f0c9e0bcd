// The optimizers' updates of many variables in one launch: one pass over each value, its
// gradient and its slots.
//
// Every operation is rounded once, in the order of the NumPy line (rules.py), so the device
// computes the same bits as the host, except for subnormals.  CuPy's expressions would need a
// launch, and a pass over memory, for each operation.
//
// Three tables describe the work.  A row of `variables` is {address of the value, of slot 0,
// of slot 1, elements}.  The row of `gradients` with the same index is {address, kind}: a
// gradient of any dtype is read as it is.  A row of `chunks` is {row of variables, first
// element}: block b updates chunk b, at most `chunk` elements.
#include "common.cuh"

__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double root(double a) { return __dsqrt_rn(a); }

// A gradient of any dtype, converted to TA where it is loaded.
template <class TA> struct AnyGradient {
    i64 address;
    int kind;

    __device__ __forceinline__ int bytes() const { return kind == F64 ? 8 : kind == F32 ? 4 : 2; }
    template <int N, class T> __device__ __forceinline__ Vec<TA, N> converted() const {
        const Vec<T, N> in = load<N>(reinterpret_cast<const T *>(address));
        Vec<TA, N> out;
#pragma unroll
        for (int k = 0; k < N; k++) out.at[k] = (TA)widen(in.at[k]);
        return out;
    }
    __device__ __forceinline__ AnyGradient operator+(i64 i) const { return {address + i * bytes(), kind}; }
};
template <int N, class TA> __device__ __forceinline__ bool aligned(AnyGradient<TA> gradient) {
    return gradient.address % (gradient.bytes() * N) == 0;
}
template <int N, class TA> __device__ __forceinline__ Vec<TA, N> load(AnyGradient<TA> gradient) {
    switch (gradient.kind) {
        case F16: return gradient.template converted<N, f16>();
        case BF16: return gradient.template converted<N, bf16>();
        case F32: return gradient.template converted<N, float>();
        default: return gradient.template converted<N, TA>();
    }
}

// What a block works on.
struct Piece {
    const i64 *variable, *gradient;
    i64 row, first;
    int n;

    __device__ __forceinline__ Piece(const i64 *variables, const i64 *gradients, const i64 *chunks, i64 chunk)
        : row(chunks[2 * blockIdx.x]), first(chunks[2 * blockIdx.x + 1]) {
        variable = variables + 4 * row;
        gradient = gradients + 2 * row;
        n = (int)min(chunk, variable[3] - first);
    }
    template <class T> __device__ __forceinline__ T *at(i64 address) const {
        return reinterpret_cast<T *>(address) + first;
    }
    // Without a table all variables have one rate.
    template <class T> __device__ __forceinline__ T rate(const T *rates, T rate) const {
        return rates ? rates[row] : rate;
    }
};

template <class TV, class TA, int SLOTS, int N> struct Held {
    Vec<TV, N> value;
    Vec<TA, N> grad, slot[SLOTS + 1];
};

// value, slots = rule(value, gradient, slots).  The gradient may be the value's memory.
template <int SLOTS, class TV, class TA, class Gradient, class Rule>
__device__ __forceinline__ void update(TV *value, Gradient grad, TA *slot0, TA *slot1, int n, Rule rule) {
    constexpr int V = Width<TV, TA>::value;
    TA *const slots[] = {slot0, slot1};
    bool vectors = aligned<V>(value) && aligned<V>(grad);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) vectors = vectors && aligned<V>(slots[s]);
    stream<V, SLOTS ? 1 : 2>(
        threadIdx.x, blockDim.x, n, vectors,
        [&](i64 i, auto size) {
            constexpr int N = decltype(size)::value;
            Held<TV, TA, SLOTS, N> held;
            held.value = load<N>(value + i);
#pragma unroll
            for (int s = 0; s < SLOTS; s++) held.slot[s] = load<N>(slots[s] + i);
            held.grad = load<N>(grad + i);
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

// The usual gradient has code without branches.
template <int SLOTS, class TV, class TA, class Rule>
__device__ __forceinline__ void update(const Piece &piece, Rule rule) {
    const i64 *variable = piece.variable, address = piece.gradient[0];
    const int kind = (int)piece.gradient[1];
    TV *value = piece.at<TV>(variable[0]);
    TA *slot0 = piece.at<TA>(variable[1]), *slot1 = piece.at<TA>(variable[2]);
    if (sizeof(TV) == 4 && kind == F32)
        update<SLOTS>(value, piece.at<const TA>(address), slot0, slot1, piece.n, rule);
    else
        update<SLOTS>(value, AnyGradient<TA>{address, kind} + piece.first, slot0, slot1, piece.n, rule);
}

#define TABLES const i64 *variables, const i64 *gradients, const i64 *chunks, i64 chunk

#define UPDATES(KIND, TV, TA)                                                                             \
    KERNEL sgd_##KIND(TABLES, const TA *rates, TA rate) {                                                 \
        const Piece piece(variables, gradients, chunks, chunk);                                           \
        rate = piece.rate(rates, rate);                                                                   \
        update<0, TV, TA>(piece, [=](TA x, TA g, TA &, TA &) { return minus(x, multiply(g, rate)); });    \
    }                                                                                                     \
    KERNEL momentum_##KIND(TABLES, const TA *rates, TA rate, TA momentum) {                               \
        const Piece piece(variables, gradients, chunks, chunk);                                           \
        rate = piece.rate(rates, rate);                                                                   \
        update<1, TV, TA>(piece, [=](TA x, TA g, TA &a, TA &) {                                           \
            a = plus(multiply(a, momentum), g);                                                           \
            return minus(x, multiply(a, rate));                                                           \
        });                                                                                               \
    }                                                                                                     \
    KERNEL nesterov_##KIND(TABLES, const TA *rates, TA rate, TA momentum) {                               \
        const Piece piece(variables, gradients, chunks, chunk);                                           \
        rate = piece.rate(rates, rate);                                                                   \
        update<1, TV, TA>(piece, [=](TA x, TA g, TA &a, TA &) {                                           \
            a = plus(multiply(a, momentum), g);                                                           \
            return minus(x, multiply(plus(multiply(a, momentum), g), rate));                              \
        });                                                                                               \
    }                                                                                                     \
    KERNEL adagrad_##KIND(TABLES, const TA *rates, TA rate) {                                             \
        const Piece piece(variables, gradients, chunks, chunk);                                           \
        rate = piece.rate(rates, rate);                                                                   \
        update<1, TV, TA>(piece, [=](TA x, TA g, TA &a, TA &) {                                           \
            a = plus(a, multiply(g, g));                                                                  \
            return minus(x, multiply(divide(g, root(a)), rate));                                          \
        });                                                                                               \
    }                                                                                                     \
    KERNEL adam_##KIND(TABLES, const TA *rates, TA rate, TA decay, TA beta1, TA rest1, TA beta2,          \
                       TA rest2, TA epsilon) {                                                            \
        const Piece piece(variables, gradients, chunks, chunk);                                           \
        rate = piece.rate(rates, rate);                                                                   \
        update<2, TV, TA>(piece, [=](TA x, TA g, TA &m, TA &v) {                                          \
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
