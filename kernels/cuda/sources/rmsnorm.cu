// RMS norm of rows [R,N], one block a row, computed in float32.
//
// -DELEMENT, -DWEIGHT: dtypes of x and weight. `packed`: rows are contiguous, start at multiples of 16 bytes and are
// multiples of 16 bytes long: each load is one of 16 bytes.
#include "numbers.cuh"

#define MAX_THREADS 256 // threads of a block, a multiple of 32
constexpr int VECTOR = 16 / sizeof(ELEMENT);
typedef Pack<ELEMENT, VECTOR> Vector;

__device__ float sum_of_block(float x) {
    __shared__ float warp_sums[MAX_THREADS / 32];
    x = sum_of_warp(x);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) sum += warp_sums[warp];
    return sum;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS) rmsnorm(
    const ELEMENT *x, const WEIGHT *weight, ELEMENT *y, long long columns, long long x_row, long long x_column,
    long long weight_column, float eps, float offset, int packed) {
    const ELEMENT *x_start = x + blockIdx.x * x_row;
    ELEMENT *y_start = y + blockIdx.x * columns;

    float squares = 0;
    if (packed)
        for (long long column = threadIdx.x * VECTOR; column < columns; column += blockDim.x * VECTOR) {
            Vector vector = *reinterpret_cast<const Vector *>(x_start + column);
            for (int i = 0; i < VECTOR; ++i) squares += to_float(vector.elements[i]) * to_float(vector.elements[i]);
        }
    else
        for (long long column = threadIdx.x; column < columns; column += blockDim.x) {
            float value = to_float(x_start[column * x_column]);
            squares += value * value;
        }
    float rstd = 1 / sqrtf(sum_of_block(squares) / columns + eps);

    if (packed)
        for (long long column = threadIdx.x * VECTOR; column < columns; column += blockDim.x * VECTOR) {
            Vector vector = *reinterpret_cast<const Vector *>(x_start + column);
            for (int i = 0; i < VECTOR; ++i)
                store(vector.elements[i], to_float(vector.elements[i]) * rstd * (to_float(weight[(column + i) * weight_column]) + offset));
            *reinterpret_cast<Vector *>(y_start + column) = vector;
        }
    else
        for (long long column = threadIdx.x; column < columns; column += blockDim.x)
            store(y_start[column], to_float(x_start[column * x_column]) * rstd * (to_float(weight[column * weight_column]) + offset));
}
