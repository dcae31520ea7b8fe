// Decode attention over a paged KV cache, split along the keys: one block for a split and up to GROUP heads of a key head.
//
// -DELEMENT, -DCACHE: dtypes of queries and caches; -DGROUP: query heads of a block; -DVECTOR: adjacent elements of a head
// that a lane has, D <= 32 VECTOR, loaded at once if `packed`. The warps of a block take keys in turn and load the next
// one ahead. Scores are in units of log2(e).
#include "numbers.cuh"

#define WARPS 4

// 0 for a maximum of -inf: exp2(-inf - 0) is zero, exp2(-inf + inf) NaN.
__device__ inline float finite_shift(float m) { return m == -INFINITY ? 0 : m; }

__device__ inline float nan_max(float x, float y) { return x > y || x != x ? x : y; }

// VECTOR elements of a head, zeros beyond D.
struct HeadVector {
    CACHE elements[VECTOR];

    __device__ void read(const CACHE *row, long long stride, int lane, int D, bool packed) {
        if (packed) {
            Pack<CACHE, VECTOR> vector = {};
            if (lane * VECTOR < D) vector = *reinterpret_cast<const Pack<CACHE, VECTOR> *>(row + lane * VECTOR);
            for (int i = 0; i < VECTOR; ++i) elements[i] = vector.elements[i];
        } else
            for (int i = 0; i < VECTOR; ++i) {
                int element = lane * VECTOR + i;
                elements[i] = element < D ? row[element * stride] : CACHE{};
            }
    }
};

// With several splits, partials [B, H, splits, D] are their normalised outputs and lse [B, H, splits] their base-2
// log-sum-exps, which merge.cu merges; with one, the result goes to `out`.
extern "C" __global__ void __launch_bounds__(WARPS * 32) attention_decode(
    const ELEMENT *q, const CACHE *k, const CACHE *v, const int *table, const int *lengths, ELEMENT *out, float *partials,
    float *lse, long long q_batch, long long q_head, long long q_element, long long k_page, long long k_slot,
    long long k_head, long long k_element, long long v_page, long long v_slot, long long v_head, long long v_element,
    long long table_row, long long table_entry, long long length_stride, int D, int key_heads, int heads_per_key_head, int page,
    int keys, int splits, int packed, float score_scale, float out_scale) {
    __shared__ float warp_max[WARPS][GROUP], warp_sum[WARPS][GROUP], warp_values[WARPS][GROUP][VECTOR * 32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, split = blockIdx.y;
    int tiles = (heads_per_key_head + GROUP - 1) / GROUP;
    int first_head = blockIdx.x % tiles * GROUP, key_head = blockIdx.x / tiles % key_heads;
    long long batch = blockIdx.x / tiles / key_heads;

    float query[GROUP][VECTOR], value[GROUP][VECTOR], m_i[GROUP], l_i[GROUP];
    for (int g = 0; g < GROUP; ++g) {
        long long head = key_head * (long long)heads_per_key_head + first_head + g;
        m_i[g] = -INFINITY;
        l_i[g] = 0;
        for (int i = 0; i < VECTOR; ++i) {
            int element = lane * VECTOR + i;
            bool inside = first_head + g < heads_per_key_head && element < D;
            query[g][i] = inside ? to_float(q[batch * q_batch + head * q_head + element * q_element]) : 0;
            value[g][i] = 0;
        }
    }

    int length = lengths[batch * length_stride];
    length = length < keys ? length : keys; // the table has no more pages
    int keys_per_split = (length + splits - 1) / splits, first = split * keys_per_split;
    int last = first + keys_per_split < length ? first + keys_per_split : length;
    HeadVector next_key, next_value;
    auto read = [&](int position) {
        if (position >= last) return;
        long long page_id = table[batch * table_row + position / page * table_entry], slot = position % page;
        next_key.read(k + page_id * k_page + slot * k_slot + key_head * k_head, k_element, lane, D, packed);
        next_value.read(v + page_id * v_page + slot * v_slot + key_head * v_head, v_element, lane, D, packed);
    };
    read(first + warp);
    for (int position = first + warp; position < last; position += WARPS) {
        float key[VECTOR], val[VECTOR];
        for (int i = 0; i < VECTOR; ++i) {
            key[i] = to_float(next_key.elements[i]);
            val[i] = to_float(next_value.elements[i]);
        }
        read(position + WARPS);
        for (int g = 0; g < GROUP; ++g) {
            float score = 0;
            for (int i = 0; i < VECTOR; ++i) score += query[g][i] * key[i];
            score = sum_of_warp(score) * score_scale;
            float m_new = nan_max(m_i[g], score), shift = finite_shift(m_new);
            float weight = exp2f(score - shift), rescale = exp2f(m_i[g] - shift);
            l_i[g] = l_i[g] * rescale + weight;
            for (int i = 0; i < VECTOR; ++i) value[g][i] = value[g][i] * rescale + weight * val[i];
            m_i[g] = m_new;
        }
    }

    for (int g = 0; g < GROUP; ++g) {
        if (lane == 0) {
            warp_max[warp][g] = m_i[g];
            warp_sum[warp][g] = l_i[g];
        }
        for (int i = 0; i < VECTOR; ++i) warp_values[warp][g][lane * VECTOR + i] = value[g][i];
    }
    __syncthreads();

    for (int index = threadIdx.x; index < GROUP * D; index += WARPS * 32) {
        int g = index / D, element = index % D;
        if (first_head + g >= heads_per_key_head) continue;
        float max_all = -INFINITY, sum_all = 0, result = 0;
        for (int w = 0; w < WARPS; ++w) max_all = nan_max(max_all, warp_max[w][g]);
        for (int w = 0; w < WARPS; ++w) {
            float rescale = exp2f(warp_max[w][g] - finite_shift(max_all));
            sum_all += warp_sum[w][g] * rescale;
            result += warp_values[w][g][element] * rescale;
        }
        result = result / (sum_all == 0 ? 1 : sum_all) * out_scale; // nothing to attend to: zero
        long long row = (batch * key_heads + key_head) * heads_per_key_head + first_head + g;
        if (splits == 1)
            store(out[row * D + element], result);
        else {
            partials[(row * splits + split) * D + element] = result;
            if (element == 0) lse[row * splits + split] = finite_shift(max_all) + log2f(sum_all);
        }
    }
}
