"""conch's rotary embedding, which turns queries and keys where they lie, by a table of both angles."""

import torch
from conch.ops.embedding.rotary_embedding import rotary_embedding
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of a batch of one: tokens are rows there, and heads lie side by side."""
    tokens, heads, width = x.shape[1:]
    q = x.reshape(tokens, heads * width).clone()
    places = torch.arange(tokens, device=x.device)
    rotary_embedding(places, q, q.clone(), width, torch.cat((cos, sin), -1))
    return q.reshape(x.shape)
