// x[M,K] times 4-bit codes [K,N] for few rows, where reading the codes takes the time: each is read once for all rows.
//
// -DELEMENT; -DROWS: no fewer than M; -DPACKING: 0 plain, 1 awq, 2 gptq. A thread has 8 neighbouring columns, and the rows of k in
// turns with the block's other threads of these columns and, where K is split, with other blocks: `parts` holds then
// what each sums, and none rounds. Scales and zero-points are read once for a group; codes of 8 columns at once where
// they are neighbours (`packed`).
#include "numbers.cuh"

#define COLUMNS 32 // threads side by side, 8 columns each
#define TURNS 8
constexpr int EACH = PACKING == 0 ? 2 : PACKING == 1 ? 1 : 8; // rows of k in a step

#if PACKING == 0
typedef unsigned char CODE;
#else
typedef unsigned CODE;
#endif
constexpr int AT_ONCE = sizeof(CODE) == 1 ? 8 : 4; // codes that an instruction reads

__device__ inline int place_of(int column) { return PACKING == 1 ? column % 2 * 4 + column / 2 : column; }

extern "C" __global__ void __launch_bounds__(COLUMNS * TURNS) gemm_int4(
    const ELEMENT *x, const CODE *codes, const ELEMENT *scales, const CODE *zeros, ELEMENT *y, float *parts, int M,
    int K, int N, int group, int splits, int packed, long long x_row, long long x_column, long long code_row, long long code_column,
    long long scale_row, long long scale_column, long long zero_row, long long zero_column) {
    __shared__ float sums[TURNS][COLUMNS][8];
    int side = threadIdx.x % COLUMNS, turn = threadIdx.x / COLUMNS;
    long long first = (blockIdx.x * (long long)COLUMNS + side) * 8;
    float total[ROWS][8] = {}, scale[8];
    CODE zero[PACKING ? 1 : 8]; // as they are stored, or a word of eight
    int held = -1; // of which group scales and zero-points are

    int steps = K / EACH, share = (steps + splits - 1) / splits, end = (blockIdx.y + 1) * share;
    if (first < N)
        for (int step = blockIdx.y * share + turn; step < (end < steps ? end : steps); step += TURNS) {
            unsigned words[8];
            const CODE *row_of_codes = codes + step * code_row;
            if (PACKING == 1)
                words[0] = row_of_codes[first / 8 * code_column];
            else if (packed) {
#pragma unroll
                for (int c = 0; c < 8; c += AT_ONCE) {
                    auto some = *reinterpret_cast<const Pack<CODE, AT_ONCE> *>(row_of_codes + first + c);
                    for (int i = 0; i < AT_ONCE; ++i) words[c + i] = some.at[i];
                }
            } else
                for (int c = 0; c < 8; ++c) words[c] = first + c < N ? row_of_codes[(first + c) * code_column] : 0;
            int k = step * EACH, here = k / group, ends = (here + 1) * group;
            for (int row = 0; row < EACH; ++row, ++k) {
                if (k == ends) {
                    ++here;
                    ends += group;
                }
                if (here != held) {
                    held = here;
                    if (PACKING) zero[0] = zeros[here * zero_row + first / 8 * zero_column];
#pragma unroll
                    for (int c = 0; c < 8; ++c) {
                        bool inside = first + c < N;
                        scale[c] = inside ? number(scales[here * scale_row + (first + c) * scale_column]) : 0;
                        if (!PACKING) zero[c] = inside ? zeros[here * zero_row + (first + c) * zero_column] : 0;
                    }
                }
                float factor[ROWS];
                for (int m = 0; m < ROWS; ++m) factor[m] = m < M ? number(x[m * x_row + k * x_column]) : 0;
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    int code = PACKING == 1 ? words[0] >> place_of(c) * 4 & 15 : words[c] >> row * 4 & 15;
                    int from = PACKING ? int(zero[0] >> place_of(c) * 4 & 15) + (PACKING == 2) : zero[c]; // 2: minus one
                    float weight = (code - from) * scale[c];
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
