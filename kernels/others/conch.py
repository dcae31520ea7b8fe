"""conch's rotary embedding, which rotates queries and keys in place, by a table of cosines and sines."""

import torch
from conch.ops.embedding.rotary_embedding import rotary_embedding
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """For a batch of one; conch takes [tokens, heads * width]."""
    tokens, heads, width = x.shape[1:]
    q = x.reshape(tokens, heads * width).clone()
    positions = torch.arange(tokens, device=x.device)
    rotary_embedding(positions, q, q.clone(), width, torch.cat((cos, sin), -1))
    return q.reshape(x.shape)
