// x[M,K] times 4-bit weights [K,N] for few rows, bound by loading the codes: each is loaded once for all rows.
//
// -DELEMENT: dtype of x; -DROWS: at least M; -DPACKING: 0 plain, 1 awq, 2 gptq. A thread has 8 adjacent columns; the
// threads of a block that share them, and with split-K the blocks too, take the rows of K in turn. With several splits
// `partials` are their float32 sums. Scales and zero-points are loaded once a group, codes of several columns at once if
// they are adjacent (`packed`).
#include "numbers.cuh"

#define THREADS_N 32 // each has 8 columns
#define THREADS_K 8
constexpr int PACK_FACTOR = PACKING == 0 ? 2 : PACKING == 1 ? 1 : 8; // rows of k in a step

#if PACKING == 0
typedef unsigned char CODE;
#else
typedef unsigned CODE;
#endif
constexpr int VECTOR = sizeof(CODE) == 1 ? 8 : 4; // codes that one instruction loads

__device__ inline int nibble_of(int column) { return PACKING == 1 ? column % 2 * 4 + column / 2 : column; }

extern "C" __global__ void __launch_bounds__(THREADS_N * THREADS_K) gemm_int4(
    const ELEMENT *x, const CODE *codes, const ELEMENT *scales, const CODE *zeros, ELEMENT *y, float *partials, int M,
    int K, int N, int group, int splits, int packed, long long x_row, long long x_column, long long code_row, long long code_column,
    long long scale_row, long long scale_column, long long zero_row, long long zero_column) {
    __shared__ float sums[THREADS_K][THREADS_N][8];
    int thread_n = threadIdx.x % THREADS_N, thread_k = threadIdx.x / THREADS_N;
    long long first = (blockIdx.x * (long long)THREADS_N + thread_n) * 8;
    float total[ROWS][8] = {}, scale[8];
    CODE zero[PACKING ? 1 : 8]; // a word of eight, or one each
    int loaded_group = -1; // whose scales and zero-points are in registers

    int steps = K / PACK_FACTOR, steps_per_split = (steps + splits - 1) / splits, end = (blockIdx.y + 1) * steps_per_split;
    if (first < N)
        for (int step = blockIdx.y * steps_per_split + thread_k; step < (end < steps ? end : steps); step += THREADS_K) {
            unsigned words[8];
            const CODE *row_of_codes = codes + step * code_row;
            if (PACKING == 1)
                words[0] = row_of_codes[first / 8 * code_column];
            else if (packed) {
#pragma unroll
                for (int c = 0; c < 8; c += VECTOR) {
                    auto vector = *reinterpret_cast<const Pack<CODE, VECTOR> *>(row_of_codes + first + c);
                    for (int i = 0; i < VECTOR; ++i) words[c + i] = vector.elements[i];
                }
            } else
                for (int c = 0; c < 8; ++c) words[c] = first + c < N ? row_of_codes[(first + c) * code_column] : 0;
            int k = step * PACK_FACTOR, group_id = k / group, group_end = (group_id + 1) * group;
            for (int row = 0; row < PACK_FACTOR; ++row, ++k) {
                if (k == group_end) {
                    ++group_id;
                    group_end += group;
                }
                if (group_id != loaded_group) {
                    loaded_group = group_id;
                    if (PACKING) zero[0] = zeros[group_id * zero_row + first / 8 * zero_column];
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        bool inside = first + c < N;
                        scale[c] = inside ? to_float(scales[group_id * scale_row + (first + c) * scale_column]) : 0;
                        if (!PACKING) zero[c] = inside ? zeros[group_id * zero_row + (first + c) * zero_column] : 0;
                    }
                }
                float factor[ROWS];
                for (int m = 0; m < ROWS; ++m) factor[m] = m < M ? to_float(x[m * x_row + k * x_column]) : 0;
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    int code = PACKING == 1 ? words[0] >> nibble_of(c) * 4 & 15 : words[c] >> row * 4 & 15;
                    int zero_point = PACKING ? int(zero[0] >> nibble_of(c) * 4 & 15) + (PACKING == 2) : zero[c]; // GPTQ stores them minus one
                    float weight = (code - zero_point) * scale[c];
                    for (int m = 0; m < ROWS; ++m) total[m][c] += factor[m] * weight;
                }
            }
        }

#pragma unroll // so that total[m] stays in registers
    for (int m = 0; m < ROWS; ++m) {
        if (m == M) return;
        for (int c = 0; c < 8; ++c) sums[thread_k][thread_n][c] = total[m][c];
        __syncthreads();
        for (int c = thread_k; c < 8; c += THREADS_K)
            if (first + c < N) {
                float result = 0;
                for (int t = 0; t < THREADS_K; ++t) result += sums[t][thread_n][c];
                if (splits == 1)
                    store(y[m * (long long)N + first + c], result);
                else
                    partials[(blockIdx.y * (long long)M + m) * N + first + c] = result;
            }
        __syncthreads();
    }
}
