"""A mixture of experts that are divided among ranks: tokens travel to their experts, or are known to every rank.

D. Lepikhin et al., *GShard*, arXiv 2006.16668, section 3 (dispatch and combine by all-to-all); no token is dropped.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.parallel.collectives import check_even, check_wire, copied, exchanged, reduced
from assay.kernels.triton.arguments import check_moe


def moe_dispatched(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    wire: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
) -> Tensor:
    """sum_k weight_k down_k(silu(gate_k x) * up_k x) of this rank's tokens x[T,D], whose experts are on any rank.

    ``w_gate_up[E/ranks,2F,D]`` and ``w_down[E/ranks,D,F]`` are this rank's experts, ``ids[T,k]``, int32, count those of
    all ranks, in the order of the ranks; ``weights[T,k]`` are float32. A rank may have any number of tokens. A token
    is sent once for each of its choices, and comes back in ``wire``. Products are float32, the hidden activation is
    rounded to x's dtype, choices are added in float32, and the result [T,D] is rounded to x's dtype.

    Raises TypeError or ValueError, naming the argument, for another dtype or shape, and on every rank where one has
    more experts than another.
    """
    own = _own_experts(x, w_gate_up, w_down, weights, ids, wire, group)
    tokens, choices = ids.shape
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    sent = torch.bincount(flat // own, minlength=dist.get_world_size(group))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    there, back = sent.tolist(), received.tolist()
    rows = exchanged(x[order // max(choices, 1)], there, back, group)
    chosen = exchanged(flat[order], there, back, group) - dist.get_rank(group) * own
    mixed = exchanged(_experts(rows, chosen, w_gate_up, w_down, x.dtype).to(wire), back, there, group)
    shares = mixed.float()[torch.argsort(order)].reshape(tokens, choices, x.shape[1])
    return (shares * weights[:, :, None]).sum(1).to(x.dtype)


def moe_reduced(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    wire: torch.dtype = torch.float32,
    group: ProcessGroup | None = None,
) -> Tensor:
    """The same of tokens x[T,D] with weights and ids that every rank has whole; the result has the same bits on all.

    Each rank adds the shares of its experts in float32 and rounds their sum to ``wire``, in which ranks add.
    """
    own = _own_experts(x, w_gate_up, w_down, weights, ids, wire, group)
    tokens, choices = ids.shape
    local = ids.flatten().long() - dist.get_rank(group) * own
    (here,) = torch.nonzero((local >= 0) & (local < own), as_tuple=True)
    token = here // max(choices, 1)
    rows, factors = copied(x.float(), group)[token], copied(weights, group).flatten()[here]
    shares = _experts(rows, local[here], w_gate_up, w_down, x.dtype) * factors[:, None]
    partial = shares.new_zeros(tokens, x.shape[1]).index_add(0, token, shares)
    return reduced(partial.to(wire), group).to(x.dtype)


def _own_experts(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    wire: torch.dtype,
    group: ProcessGroup | None,
) -> int:
    """How many experts each rank has, of arguments that are checked."""
    check_moe(x, w_gate_up, w_down, weights, ids)
    check_wire(wire)
    check_even("w_down", w_down, group)
    if not len(w_down):
        raise ValueError("w_down: expected an expert on each rank, got 0")
    return len(w_down)


def _experts(rows: Tensor, chosen: Tensor, w_gate_up: Tensor, w_down: Tensor, dtype: torch.dtype) -> Tensor:
    """What the expert that is chosen for each row gives, in float32; the hidden activation is rounded to ``dtype``."""
    places, outputs = [], []
    for expert, (first, last) in enumerate(zip(w_gate_up, w_down, strict=True)):
        (place,) = torch.nonzero(chosen == expert, as_tuple=True)
        gate, up = (rows[place].float() @ first.float().T).chunk(2, dim=-1)
        hidden = (torch.where(gate == -torch.inf, 0.0, F.silu(gate)) * up).to(dtype)
        places.append(place)
        outputs.append(hidden.float() @ last.float().T)
    return torch.cat(outputs)[torch.argsort(torch.cat(places))]
