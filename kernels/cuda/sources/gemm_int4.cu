// x[M,K] times 4-bit codes [K,N] for few rows, where reading the codes takes the time: each is read once for all rows.
//
// -DELEMENT; -DROWS: no fewer than M; -DPACKING: 0 plain, 1 awq, 2 gptq. A thread has 8 neighbouring columns, and the rows of k in
// turns with the block's other threads of these columns and, where K is split, with other blocks: `parts` holds then
// what each sums, and none rounds.
#include "numbers.cuh"

#define COLUMNS 32 // threads side by side, 8 columns each
#define TURNS 8
constexpr int EACH = PACKING == 0 ? 2 : PACKING == 1 ? 1 : 8; // rows of k in a step

__device__ inline int place_of(int column) { return PACKING == 1 ? column % 2 * 4 + column / 2 : column; }

extern "C" __global__ void __launch_bounds__(COLUMNS * TURNS) gemm_int4(
    const ELEMENT *x, const void *codes, const ELEMENT *scales, const void *zeros, ELEMENT *y, float *parts, int M,
    int K, int N, int group, int splits, long long x_row, long long x_column, long long code_row, long long code_column,
    long long scale_row, long long scale_column, long long zero_row, long long zero_column) {
    __shared__ float sums[TURNS][COLUMNS][8];
    int side = threadIdx.x % COLUMNS, turn = threadIdx.x / COLUMNS;
    long long first = (blockIdx.x * (long long)COLUMNS + side) * 8;
    float total[ROWS][8] = {};

    int steps = K / EACH, share = (steps + splits - 1) / splits, end = (blockIdx.y + 1) * share;
    if (first < N)
        for (int step = blockIdx.y * share + turn; step < (end < steps ? end : steps); step += TURNS) {
            unsigned words[8];
            for (int c = 0; c < (PACKING == 1 ? 1 : 8); ++c) {
                long long at = step * code_row + (PACKING == 1 ? first / 8 : first + c) * code_column;
                if (PACKING != 1 && first + c >= N)
                    words[c] = 0;
                else if (PACKING == 0)
                    words[c] = static_cast<const unsigned char *>(codes)[at];
                else
                    words[c] = static_cast<const unsigned *>(codes)[at];
            }
            for (int row = 0; row < EACH; ++row) {
                int k = step * EACH + row, here = k / group;
                unsigned zero_word = 0;
                if (PACKING) zero_word = static_cast<const unsigned *>(zeros)[here * zero_row + first / 8 * zero_column];
                float factor[ROWS];
                for (int m = 0; m < ROWS; ++m) factor[m] = m < M ? number(x[m * x_row + k * x_column]) : 0;
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if (first + c >= N) continue;
                    int code = PACKING == 1 ? words[0] >> place_of(c) * 4 & 15 : words[c] >> row * 4 & 15;
                    int zero = PACKING == 0
                                   ? static_cast<const unsigned char *>(zeros)[here * zero_row + (first + c) * zero_column]
                                   : int(zero_word >> place_of(c) * 4 & 15) + (PACKING == 2); // stored minus one
                    float weight = (code - zero) * number(scales[here * scale_row + (first + c) * scale_column]);
                    for (int m = 0; m < ROWS; ++m) total[m][c] += factor[m] * weight;
                }
            }
        }

#pragma unroll // so that sums of a thread are registers
    for (int m = 0; m < ROWS; ++m) {
        if (m == M) return;
        for (int c = 0; c < 8; ++c) sums[turn][side][c] = total[m][c];
        __syncthreads();
        for (int c = turn; c < 8; c += TURNS)
            if (first + c < N) {
                float result = 0;
                for (int t = 0; t < TURNS; ++t) result += sums[t][side][c];
                if (splits == 1)
                    put(y[m * (long long)N + first + c], result);
                else
                    parts[(blockIdx.y * (long long)M + m) * N + first + c] = result;
            }
        __syncthreads();
    }
}
