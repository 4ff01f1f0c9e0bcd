// Rows of a gradient added to a matrix, with a count of contributions for each row.
//
// A warp processes a row: its lanes read the same index and consecutive elements.  The
// additions are atomic because a gradient may contain a row more than once.
#include "common.cuh"

#define LANES 32
#define DEPTH 4  // loads in flight

__device__ __forceinline__ i64 grid_warp() { return grid_thread() / LANES; }
__device__ __forceinline__ i64 grid_warps() { return grid_threads() / LANES; }

// sum += values, element by element, atomically; DEPTH loads in flight.
template <class T> __device__ __forceinline__ void scatter_row(T *sum, const T *values, i64 width) {
    const int lane = threadIdx.x % LANES;
    for (i64 begin = lane; begin < width; begin += DEPTH * LANES) {
        T held[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (begin + d * LANES < width) held[d] = values[begin + d * LANES];
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (begin + d * LANES < width) atomicAdd(sum + begin + d * LANES, held[d]);
    }
}

template <class T>
__device__ __forceinline__ void scatter_add_rows(T *sum, int *counts, const T *values, const i64 *rows, i64 k,
                                                 i64 width, i64 num_rows, i64 *refused) {
    const int lane = threadIdx.x % LANES;
    for (i64 j = grid_warp(); j < k; j += grid_warps()) {
        const i64 row = rows[j];
        const bool inside = 0 <= row && row < num_rows;
        if (inside) scatter_row(sum + row * width, values + j * width, width);
        if (lane != 0) continue;
        if (inside) atomicAdd(counts + row, 1);
        else atomicAdd(reinterpret_cast<unsigned long long *>(refused), 1ull);
    }
}

// sum[rows[j]] += values[j] and counts[rows[j]] += 1 for k rows of `width` elements.  Rows
// outside 0..num_rows-1 are not added; refused counts them.
#define SCATTER_ADD_ROWS(name, T)                                                        \
    KERNEL name(T *sum, int *counts, const T *values, const i64 *rows, i64 k, i64 width, \
                i64 num_rows, i64 *refused) {                                            \
        scatter_add_rows(sum, counts, values, rows, k, width, num_rows, refused);        \
    }
SCATTER_ADD_ROWS(scatter_add_rows_f32, float)
SCATTER_ADD_ROWS(scatter_add_rows_f64, double)

// Rows with at most one contribution are not read.
template <class T>
__device__ __forceinline__ void mean_rows(T *sum, const int *counts, i64 num_rows, i64 width) {
    for (i64 row = grid_warp(); row < num_rows; row += grid_warps()) {
        const int count = counts[row];
        if (count <= 1) continue;
        T *begin = sum + row * width;
        for (i64 i = threadIdx.x % LANES; i < width; i += LANES) begin[i] = divide(begin[i], (T)count);
    }
}

// sum[row] /= counts[row], in place.
#define MEAN_ROWS(name, T)                                                  \
    KERNEL name(T *sum, const int *counts, i64 num_rows, i64 width) {       \
        mean_rows(sum, counts, num_rows, width);                            \
    }
MEAN_ROWS(mean_rows_f32, float)
MEAN_ROWS(mean_rows_f64, double)
