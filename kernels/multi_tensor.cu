// Many arrays in one launch: added to a flat buffer, packed into it, unpacked from it;
// their largest absolute values.
//
// Two tables describe the work.  A row of `arrays` is {address, offset in the flat buffer,
// elements, kind}, with offsets in elements.  A row of `chunks` is {row of arrays, first
// element}.  Block b processes chunk b, which has at most `chunk` elements.  So arrays of
// any sizes keep the whole device busy; a launch for each array would leave it idle.
#include "common.cuh"

// The part of an array that a block processes.
struct Piece {
    i64 address, offset, first, n, kind;

    __device__ __forceinline__ Piece(const i64 *arrays, const i64 *chunks, i64 chunk) {
        const i64 *row = arrays + 4 * chunks[2 * blockIdx.x];
        first = chunks[2 * blockIdx.x + 1];
        address = row[0];
        offset = row[1] + first;
        n = min(chunk, row[2] - first);
        kind = row[3];
    }
    template <class T> __device__ __forceinline__ T *array() const { return reinterpret_cast<T *>(address) + first; }

    // Call f with a pointer to the array's piece, of the array's type.
    template <class F> __device__ __forceinline__ void visit(F f) const {
        switch (kind) {
            case F32: f(array<float>()); break;
            case F64: f(array<double>()); break;
            case F16: f(array<f16>()); break;
            case BF16: f(array<bf16>()); break;
        }
    }
};

template <class TA>
__device__ __forceinline__ void multi_accumulate(TA *flat, const Piece &piece, TA scale, int first) {
    TA *sum = flat + piece.offset;
    piece.visit([&](const auto *gradient) {
        if (first) add<true>(sum, gradient, scale, threadIdx.x, blockDim.x, piece.n);
        else add<false>(sum, gradient, scale, threadIdx.x, blockDim.x, piece.n);
    });
}

// to = from, converted in float64 if either is, else in float32.
template <class TO, class FROM>
__device__ __forceinline__ void convert(TO *to, const FROM *from, i64 n) {
    using Wide = decltype(widen(TO()) * widen(FROM()));
    constexpr int V = Width<TO, FROM>::value;
    auto get = [=](i64 i, auto size) { return load<decltype(size)::value>(from + i); };
    auto put = [=](i64 i, auto in, auto size) {
        constexpr int N = decltype(size)::value;
        Vec<TO, N> out;
#pragma unroll
        for (int j = 0; j < N; j++) out.at[j] = narrow<TO>((Wide)widen(in.at[j]));
        store(to + i, out);
    };
    stream<V, 4>(threadIdx.x, blockDim.x, n, aligned<V>(to) && aligned<V>(from), get, put);
}

// flat[offset + i] = scale * array[i] + flat[offset + i]; without the addend if `first`.
#define MULTI_ACCUMULATE(name, TA)                                                                    \
    KERNEL name(TA *flat, const i64 *arrays, const i64 *chunks, i64 chunk, TA scale, int first) {     \
        multi_accumulate(flat, Piece(arrays, chunks, chunk), scale, first);                           \
    }
MULTI_ACCUMULATE(multi_accumulate_f32, float)
MULTI_ACCUMULATE(multi_accumulate_f64, double)

// flat[offset + i] = array[i], converted.
#define PACK(name, TF)                                                                         \
    KERNEL name(TF *flat, const i64 *arrays, const i64 *chunks, i64 chunk) {                   \
        const Piece piece(arrays, chunks, chunk);                                              \
        piece.visit([&](const auto *array) { convert(flat + piece.offset, array, piece.n); }); \
    }
PACK(pack_f32, float)
PACK(pack_f64, double)
PACK(pack_f16, f16)
PACK(pack_bf16, bf16)

// array[i] = flat[offset + i], converted.
#define UNPACK(name, TF)                                                                       \
    KERNEL name(const TF *flat, const i64 *arrays, const i64 *chunks, i64 chunk) {             \
        const Piece piece(arrays, chunks, chunk);                                              \
        piece.visit([&](auto *array) { convert(array, flat + piece.offset, piece.n); });       \
    }
UNPACK(unpack_f32, float)
UNPACK(unpack_f64, double)
UNPACK(unpack_f16, f16)
UNPACK(unpack_bf16, bf16)

// The larger absolute value; NaN if either is NaN.
template <class T> __device__ __forceinline__ T larger(T top, T x) {
    x = x < 0 ? -x : x;
    return x > top || x != x ? x : top;
}

template <class T> __device__ __forceinline__ double largest(const T *x, i64 n) {
    constexpr int V = Width<T, T>::value;
    decltype(widen(T())) top = 0;
    auto get = [=](i64 i, auto size) { return load<decltype(size)::value>(x + i); };
    auto put = [&](i64, auto held, auto size) {
#pragma unroll
        for (int j = 0; j < decltype(size)::value; j++) top = larger(top, widen(held.at[j]));
    };
    stream<V, 4>(threadIdx.x, blockDim.x, n, aligned<V>(x), get, put);
    return top;
}

// result[row] = the largest absolute value of array `row`; NaN if the array has one.  All are
// 0 before.  Doubles of at least 0 have the order of their bits, in which NaN is last.
KERNEL largest_f64(double *result, const i64 *arrays, const i64 *chunks, i64 chunk) {
    const Piece piece(arrays, chunks, chunk);
    double top = 0;
    piece.visit([&](const auto *array) { top = largest(array, piece.n); });
    for (int d = 16; d; d /= 2) top = larger(top, __shfl_down_sync(0xffffffffu, top, d));
    if (threadIdx.x % 32 == 0)
        atomicMax(reinterpret_cast<unsigned long long *>(result) + chunks[2 * blockIdx.x],
                  (unsigned long long)__double_as_longlong(top));
}
