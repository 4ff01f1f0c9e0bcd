// Rows of a gradient added to a matrix, with the weight of the contributions to each row.
//
// Threads take consecutive elements, whatever their rows, so that loads of several rows are
// in flight and narrow rows leave no thread idle.  The additions are atomic because a
// gradient may contain a row more than once.
#include "common.cuh"

// Elements of rows that are processed together.  Their indices have 32 bits: a division of
// 64 bits takes several times as long.  A row must be shorter (device_rows.py).
#define MOST_ELEMENTS 0xffffffffll

// Call work(first row, number of rows) for consecutive groups.
template <class Work> __device__ __forceinline__ void groups(i64 rows, i64 width, Work work) {
    const i64 most = max(MOST_ELEMENTS / max(width, 1ll), 1ll);
#pragma unroll 1
    for (i64 first = 0; first < rows; first += most) work(first, min(most, rows - first));
}

template <class T, int N> __device__ __forceinline__ void atomic_add(T *to, const Vec<T, N> &values) {
#pragma unroll
    for (int j = 0; j < N; j++) atomicAdd(to + j, values.at[j]);
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VECTOR 4
// One access instead of four.
template <> __device__ __forceinline__ void atomic_add(float *to, const Vec<float, VECTOR> &values) {
    const float *v = values.at;
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
                 : "memory");
}
#else
// The additions of a warp to neighbouring elements are one access.
#define VECTOR 1
#endif

template <class T, int N> struct RowPart {
    i64 row;
    unsigned column;
    Vec<T, N> values;
};

template <class T>
__device__ __forceinline__ void scatter(T *sum, const T *values, const i64 *rows, i64 k, unsigned width,
                                        i64 num_rows, T weight) {
    constexpr int V = sizeof(T) == 4 ? VECTOR : 1;
    const bool vectors = width % V == 0 && aligned<V>(sum) && aligned<V>(values);
    auto get = [=](i64 i, auto size) {
        constexpr int N = decltype(size)::value;
        const unsigned j = (unsigned)i / width;
        return RowPart<T, N>{rows[j], (unsigned)i - j * width, load<N>(values + i)};
    };
    auto put = [=](i64, auto part, auto size) {
#pragma unroll
        for (int j = 0; j < decltype(size)::value; j++) part.values.at[j] = multiply(weight, part.values.at[j]);
        if (0 <= part.row && part.row < num_rows) atomic_add(sum + part.row * width + part.column, part.values);
    };
    stream<V, V == 1 ? 4 : 2>(grid_thread(), grid_threads(), k * width, vectors, get, put);
}

template <class T>
__device__ __forceinline__ void weigh(T *weights, const i64 *rows, i64 k, i64 num_rows, T weight, i64 *refused) {
    for (i64 j = grid_thread(); j < k; j += grid_threads()) {
        const i64 row = rows[j];
        if (0 <= row && row < num_rows) atomicAdd(weights + row, weight);
        else atomicAdd(reinterpret_cast<unsigned long long *>(refused), 1ull);
    }
}

// sum[rows[j]] += weight * values[j] and weights[rows[j]] += weight for k rows of `width`
// elements.  Rows outside 0..num_rows-1 are not added; refused counts them.
#define SCATTER_ADD_ROWS(name, T)                                                         \
    KERNEL name(T *sum, T *weights, const T *values, const i64 *rows, i64 k, i64 width,   \
                i64 num_rows, T weight, i64 *refused) {                                   \
        groups(k, width, [=](i64 first, i64 n) {                                          \
            scatter(sum, values + first * width, rows + first, n, width, num_rows, weight); \
        });                                                                               \
        weigh(weights, rows, k, num_rows, weight, refused);                               \
    }
SCATTER_ADD_ROWS(scatter_add_rows_f32, float)
SCATTER_ADD_ROWS(scatter_add_rows_f64, double)

template <class T, int N> struct Weighted {
    T weight;
    Vec<T, N> sums;
};

// Rows whose weight is 0 or 1 are not read.
template <class T>
__device__ __forceinline__ void mean_rows(T *sum, const T *weights, i64 rows, unsigned width) {
    constexpr int V = Width<T, T>::value;
    const bool vectors = width % V == 0 && aligned<V>(sum);
    auto get = [=](i64 i, auto size) {
        constexpr int N = decltype(size)::value;
        Weighted<T, N> part = {weights[(unsigned)i / width], {}};
        if (part.weight != 0 && part.weight != 1) part.sums = load<N>(sum + i);
        return part;
    };
    auto put = [=](i64 i, auto part, auto size) {
        constexpr int N = decltype(size)::value;
        if (part.weight == 0 || part.weight == 1) return;
#pragma unroll
        for (int j = 0; j < N; j++) part.sums.at[j] = divide(part.sums.at[j], part.weight);
        store(sum + i, part.sums);
    };
    stream<V, sizeof(T) == 4 ? 4 : 2>(grid_thread(), grid_threads(), rows * width, vectors, get, put);
}

// sum[row] /= weights[row], in place.
#define MEAN_ROWS(name, T)                                                  \
    KERNEL name(T *sum, const T *weights, i64 num_rows, i64 width) {        \
        groups(num_rows, width, [=](i64 first, i64 n) {                     \
            mean_rows(sum + first * width, weights + first, n, width);      \
        });                                                                 \
    }
MEAN_ROWS(mean_rows_f32, float)
MEAN_ROWS(mean_rows_f64, double)
