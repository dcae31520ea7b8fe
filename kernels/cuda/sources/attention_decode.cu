// Attention of one new token over a paged cache: a block of threads for one part of a sequence's keys and one key head.
//
// -DELEMENT, -DCACHE: types of queries and caches; -DGROUP: query heads that a block reads its keys for; -DEACH: places of
// a head, of D <= 32 EACH, that a lane has, neighbours, which are read at once where they lie so (`packed`). Warps take
// keys in turn, each with the next one on its way. Scores are in units of log2(e).
#include "numbers.cuh"

#define WARPS 4

// 0 where all is -inf, since exp2(-inf - 0) is zero and exp2(-inf + inf) NaN.
__device__ inline float shift_of(float most) { return most == -INFINITY ? 0 : most; }

__device__ inline float larger(float x, float y) { return x > y || x != x ? x : y; }

// EACH places of a row, zeros behind its end.
struct Places {
    CACHE at[EACH];

    __device__ void read(const CACHE *row, long long stride, int lane, int D, bool packed) {
        if (packed) {
            Pack<CACHE, EACH> some = {};
            if (lane * EACH < D) some = *reinterpret_cast<const Pack<CACHE, EACH> *>(row + lane * EACH);
            for (int i = 0; i < EACH; ++i) at[i] = some.at[i];
        } else
            for (int i = 0; i < EACH; ++i) {
                int place = lane * EACH + i;
                at[i] = place < D ? row[place * stride] : CACHE{};
            }
    }
};

// parts [B, H, splits, D] hold each part's output, normalised, lse [B, H, splits] its log-sum-exp; with one split `out`
// is what is asked for, and there are no parts.
extern "C" __global__ void __launch_bounds__(WARPS * 32) attention_decode(
    const ELEMENT *q, const CACHE *k, const CACHE *v, const int *table, const int *lengths, ELEMENT *out, float *parts,
    float *lse, long long q_batch, long long q_head, long long q_place, long long k_page, long long k_slot,
    long long k_head, long long k_place, long long v_page, long long v_slot, long long v_head, long long v_place,
    long long table_row, long long table_entry, long long length_stride, int D, int key_heads, int heads_each, int page,
    int keys, int splits, int packed, float score_scale, float out_scale) {
    __shared__ float most[WARPS][GROUP], sum[WARPS][GROUP], values[WARPS][GROUP][EACH * 32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.y;
    int tiles = (heads_each + GROUP - 1) / GROUP;
    int first_head = blockIdx.x % tiles * GROUP, key_head = blockIdx.x / tiles % key_heads;
    long long batch = blockIdx.x / tiles / key_heads;

    float query[GROUP][EACH], value[GROUP][EACH], high[GROUP], total[GROUP];
    for (int g = 0; g < GROUP; ++g) {
        long long head = key_head * (long long)heads_each + first_head + g;
        high[g] = -INFINITY;
        total[g] = 0;
        for (int i = 0; i < EACH; ++i) {
            int place = lane * EACH + i;
            bool inside = first_head + g < heads_each && place < D;
            query[g][i] = inside ? number(q[batch * q_batch + head * q_head + place * q_place]) : 0;
            value[g][i] = 0;
        }
    }

    int length = lengths[batch * length_stride];
    length = length < keys ? length : keys; // the table has no more pages
    int share = (length + splits - 1) / splits, first = split * share;
    int last = first + share < length ? first + share : length;
    Places next_key, next_value;
    auto read = [&](int position) {
        if (position >= last) return;
        long long here = table[batch * table_row + position / page * table_entry], slot = position % page;
        next_key.read(k + here * k_page + slot * k_slot + key_head * k_head, k_place, lane, D, packed);
        next_value.read(v + here * v_page + slot * v_slot + key_head * v_head, v_place, lane, D, packed);
    };
    read(first + warp);
    for (int position = first + warp; position < last; position += WARPS) {
        float key[EACH], passed[EACH];
        for (int i = 0; i < EACH; ++i) {
            key[i] = number(next_key.at[i]);
            passed[i] = number(next_value.at[i]);
        }
        read(position + WARPS);
        for (int g = 0; g < GROUP; ++g) {
            float score = 0;
            for (int i = 0; i < EACH; ++i) score += query[g][i] * key[i];
            score = sum_of_warp(score) * score_scale;
            float higher = larger(high[g], score), shift = shift_of(higher);
            float weight = exp2f(score - shift), rescale = exp2f(high[g] - shift);
            total[g] = total[g] * rescale + weight;
            for (int i = 0; i < EACH; ++i) value[g][i] = value[g][i] * rescale + weight * passed[i];
            high[g] = higher;
        }
    }

    for (int g = 0; g < GROUP; ++g) {
        if (lane == 0) {
            most[warp][g] = high[g];
            sum[warp][g] = total[g];
        }
        for (int i = 0; i < EACH; ++i) values[warp][g][lane * EACH + i] = value[g][i];
    }
    __syncthreads();

    for (int at = threadIdx.x; at < GROUP * D; at += WARPS * 32) {
        int g = at / D, place = at % D;
        if (first_head + g >= heads_each) continue;
        float highest = -INFINITY, all = 0, result = 0;
        for (int w = 0; w < WARPS; ++w) highest = larger(highest, most[w][g]);
        for (int w = 0; w < WARPS; ++w) {
            float rescale = exp2f(most[w][g] - shift_of(highest));
            all += sum[w][g] * rescale;
            result += values[w][g][place] * rescale;
        }
        result = result / (all == 0 ? 1 : all) * out_scale; // nothing to attend to: zero
        long long row = (batch * key_heads + key_head) * heads_each + first_head + g;
        if (splits == 1)
            put(out[row * D + place], result);
        else {
            parts[(row * splits + split) * D + place] = result;
            if (place == 0) lse[row * splits + split] = shift_of(highest) + log2f(all);
        }
    }
}
