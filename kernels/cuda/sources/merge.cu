// Merges the splits of each row [splits, D] by their base-2 log-sum-exp, one block a row; an empty split has -inf.
//
// -DELEMENT: dtype of the result.
#include "numbers.cuh"

#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const float *partials, const float *lse, ELEMENT *out, int splits, int width, float out_scale) {
    long long row = blockIdx.x;
    float max_lse = -INFINITY;
    for (int split = 0; split < splits; ++split) {
        float split_lse = lse[row * splits + split];
        max_lse = split_lse > max_lse || split_lse != split_lse ? split_lse : max_lse;
    }
    float shift = max_lse == -INFINITY ? 0 : max_lse;
    for (int element = threadIdx.x; element < width; element += THREADS) {
        float sum = 0, result = 0;
        for (int split = 0; split < splits; ++split) {
            float weight = exp2f(lse[row * splits + split] - shift);
            sum += weight;
            result += weight * partials[(row * splits + split) * width + element];
        }
        store(out[row * width + element], result / (sum == 0 ? 1 : sum) * out_scale);
    }
}
