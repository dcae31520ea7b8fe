"""Expert-parallel mixtures: tokens are sent to the ranks of their experts, or every rank has all tokens.

D. Lepikhin et al., *GShard*, arXiv 2006.16668, section 3 (dispatch and combine by all-to-all); no token is dropped.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from assay.kernels.parallel.collectives import all_to_all, check_even, check_wire, copy_to_ranks, sum_over_ranks
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
    """Return sum_k weight_k down_k(silu(gate_k x) * up_k x) of this rank's tokens x[T,D], with experts on any rank.

    ``w_gate_up[E/ranks,2F,D]`` and ``w_down[E/ranks,D,F]`` are this rank's experts, ``ids[T,k]``, int32, count the
    experts of all ranks, in the order of the ranks; ``weights[T,k]`` are float32. A rank may have any number of tokens.
    A token is sent once for each of its k experts, and their outputs come back in ``wire``. Products are float32, the
    hidden activation is rounded to x's dtype, outputs are added in float32, and the result [T,D] is rounded to x's
    dtype.

    Raises TypeError or ValueError, naming the argument, for another dtype or shape, and on every rank unless all have
    as many experts.
    """
    local_experts = _check(x, w_gate_up, w_down, weights, ids, wire, group)
    tokens, top_k = ids.shape
    flat = ids.flatten().long()
    order = torch.argsort(flat, stable=True)
    sent = torch.bincount(flat // local_experts, minlength=dist.get_world_size(group))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    counts_sent, counts_received = sent.tolist(), received.tolist()
    rows = all_to_all(x[order // max(top_k, 1)], counts_sent, counts_received, group)
    experts = all_to_all(flat[order], counts_sent, counts_received, group) - dist.get_rank(group) * local_experts
    outputs = _run_experts(rows, experts, w_gate_up, w_down, x.dtype).to(wire)
    outputs = all_to_all(outputs, counts_received, counts_sent, group)
    outputs = outputs.float()[torch.argsort(order)].reshape(tokens, top_k, x.shape[1])
    return (outputs * weights[:, :, None]).sum(1).to(x.dtype)


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
    """Return what `moe_dispatched` does, of tokens x[T,D], weights and ids that are the same on every rank.

    Each rank adds its experts' outputs in float32 and rounds their sum to ``wire``, in which ranks add. The result has
    the same bits on all.
    """
    local_experts = _check(x, w_gate_up, w_down, weights, ids, wire, group)
    tokens, top_k = ids.shape
    expert = ids.flatten().long() - dist.get_rank(group) * local_experts
    (pairs,) = torch.nonzero((expert >= 0) & (expert < local_experts), as_tuple=True)
    token = pairs // max(top_k, 1)
    rows, factors = copy_to_ranks(x.float(), group)[token], copy_to_ranks(weights, group).flatten()[pairs]
    outputs = _run_experts(rows, expert[pairs], w_gate_up, w_down, x.dtype) * factors[:, None]
    partial = outputs.new_zeros(tokens, x.shape[1]).index_add(0, token, outputs)
    return sum_over_ranks(partial.to(wire), group).to(x.dtype)


def _check(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    wire: torch.dtype,
    group: ProcessGroup | None,
) -> int:
    """Check the arguments and return the number of experts on each rank."""
    check_moe(x, w_gate_up, w_down, weights, ids)
    check_wire(wire)
    check_even("w_down", w_down, group)
    if not len(w_down):
        raise ValueError("w_down: expected an expert on each rank, got 0")
    return len(w_down)


def _run_experts(rows: Tensor, experts: Tensor, w_gate_up: Tensor, w_down: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the output of each row's expert, in float32; the hidden activation is rounded to ``dtype``."""
    indices, outputs = [], []
    for expert, (first, last) in enumerate(zip(w_gate_up, w_down, strict=True)):
        (index,) = torch.nonzero(experts == expert, as_tuple=True)
        gate, up = (rows[index].float() @ first.float().T).chunk(2, dim=-1)
        hidden = (torch.where(gate == -torch.inf, 0.0, F.silu(gate)) * up).to(dtype)
        indices.append(index)
        outputs.append(hidden.float() @ last.float().T)
    return torch.cat(outputs)[torch.argsort(torch.cat(indices))]
