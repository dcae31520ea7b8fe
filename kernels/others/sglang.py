"""SGLang's decode attention, which reads a flat cache by lists of slots."""

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from torch import Tensor

_SPLITS = 4  # of each sequence (split-KV)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
    (batch, heads, width), page = q.shape, k_cache.shape[1]
    lengths = [int(length) for length in seq_lens]
    positions = [torch.arange(length) for length in lengths]
    tables = block_table.cpu().long()
    slots = torch.cat([table[p // page] * page + p % page for table, p in zip(tables, positions, strict=True)])
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q.device)
    out = torch.empty_like(q)
    parts = q.new_empty(batch, heads, _SPLITS, width, dtype=torch.float32)
    lse = q.new_empty(batch, heads, _SPLITS, dtype=torch.float32)
    splits = torch.full((batch,), _SPLITS, dtype=torch.int32, device=q.device)
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    indices = slots.to(q.device)
    decode_attention_fwd(q, k, v, out, starts, indices, parts, lse, splits, _SPLITS, width**-0.5, 1.0, 1.0)
    return out
