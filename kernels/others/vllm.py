"""vLLM's attention and AWQ kernels, which write into output arguments."""

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.awq_triton import awq_gemm_triton
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states
from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd

_SPLITS = 4  # of each sequence (split-KV)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    batch, heads, width = q.shape
    out = torch.empty_like(q)
    parts = q.new_empty(batch, heads, _SPLITS, width + 1, dtype=torch.float32)
    lse = q.new_empty(batch, heads)
    scale, page = width**-0.5, k_cache.shape[1]
    decode_attention_fwd(q, k_cache, v_cache, out, lse, block_table, seq_lens, parts, _SPLITS, scale, page)
    return out


def merge_states(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM takes log-sum-exps with the heads first."""
    out, lse = torch.empty_like(o_a), torch.empty_like(lse_a.T)
    merge_attn_states(out, o_a, lse_a.T, o_b, lse_b.T, lse)
    return out, lse.T


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, causal: str
) -> Tensor:
    """For prompts without a cache: queries and keys have the same lengths."""
    out, lengths = torch.empty_like(q), cu_seqlens_q.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    context_attention_fwd(q, k, v, out, cu_seqlens_q[:-1], lengths, longest, is_causal=causal != "none")
    return out


def awq_gemm(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor, *, packing: str) -> Tensor:
    """Eight codes a word, in AWQ's order; no split-K."""
    return awq_gemm_triton(x, qweight, scales, zeros, 1)
