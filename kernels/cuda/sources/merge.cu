// The parts of each row [splits, D] weighted by 2^lse, a row each block; a part without keys has an lse of -inf.
//
// -DELEMENT: the type of the result.
#include "numbers.cuh"

#define THREADS 128

extern "C" __global__ void __launch_bounds__(THREADS) merge(
    const float *parts, const float *lse, ELEMENT *out, int splits, int width, float out_scale) {
    long long row = blockIdx.x;
    float most = -INFINITY;
    for (int split = 0; split < splits; ++split) {
        float here = lse[row * splits + split];
        most = here > most || here != here ? here : most;
    }
    float shift = most == -INFINITY ? 0 : most;
    for (int place = threadIdx.x; place < width; place += THREADS) {
        float all = 0, result = 0;
        for (int split = 0; split < splits; ++split) {
            float weight = exp2f(lse[row * splits + split] - shift);
            all += weight;
            result += weight * parts[(row * splits + split) * width + place];
        }
        put(out[row * width + place], result / (all == 0 ? 1 : all) * out_scale);
    }
}
