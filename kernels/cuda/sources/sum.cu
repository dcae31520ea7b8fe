// Sums partials [splits, count] in order; -DELEMENT: dtype of the result.
#include "numbers.cuh"

#define THREADS 256

extern "C" __global__ void __launch_bounds__(THREADS) sum(const float *partials, ELEMENT *y, int splits, long long count) {
    long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (index >= count) return;
    float total = 0;
    for (int split = 0; split < splits; ++split) total += partials[split * count + index];
    store(y[index], total);
}
