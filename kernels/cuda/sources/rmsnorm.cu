// RMS norm of rows, a block of threads each; computed in float32.
//
// -DELEMENT, -DWEIGHT: their types. `packed`: rows begin at multiples of 16 bytes, their elements are neighbours, and
// there is no rest: 16 bytes are loaded at once.
#include "numbers.cuh"

#define MOST 256 // threads of a block, a multiple of 32
constexpr int EACH = 16 / sizeof(ELEMENT);
typedef Pack<ELEMENT, EACH> Sixteen;

__device__ float sum_of_block(float x) {
    __shared__ float parts[MOST / 32];
    x = sum_of_warp(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += parts[warp];
    return total;
}

extern "C" __global__ void __launch_bounds__(MOST) rmsnorm(
    const ELEMENT *x, const WEIGHT *weight, ELEMENT *y, long long columns, long long x_row, long long x_column,
    long long weight_column, float eps, float offset, int packed) {
    const ELEMENT *from = x + blockIdx.x * x_row;
    ELEMENT *to = y + blockIdx.x * columns;

    float squares = 0;
    if (packed)
        for (long long column = threadIdx.x * EACH; column < columns; column += blockDim.x * EACH) {
            Sixteen some = *reinterpret_cast<const Sixteen *>(from + column);
            for (int i = 0; i < EACH; ++i) squares += number(some.at[i]) * number(some.at[i]);
        }
    else
        for (long long column = threadIdx.x; column < columns; column += blockDim.x) {
            float value = number(from[column * x_column]);
            squares += value * value;
        }
    float root = 1 / sqrtf(sum_of_block(squares) / columns + eps);

    if (packed)
        for (long long column = threadIdx.x * EACH; column < columns; column += blockDim.x * EACH) {
            Sixteen some = *reinterpret_cast<const Sixteen *>(from + column);
            for (int i = 0; i < EACH; ++i)
                put(some.at[i], number(some.at[i]) * root * (number(weight[(column + i) * weight_column]) + offset));
            *reinterpret_cast<Sixteen *>(to + column) = some;
        }
    else
        for (long long column = threadIdx.x; column < columns; column += blockDim.x)
            put(to[column], number(from[column * x_column]) * root * (number(weight[column * weight_column]) + offset));
}
