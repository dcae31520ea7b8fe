"""Honest kernels of the gated delta rule: by recurrence, and by chunks of any width, by substitution or inverses."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.golden.float32 import Functions

Tensor = torch.Tensor


def recurrent(f: Functions, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, scale: float) -> Tensor:
    """Place by place, all in float32; tensors [B, H, T, .], gate and beta [B, H, T]."""
    state, out = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3]), [v[:, :, :0]]
    for t in range(k.shape[2]):
        state = state * f.exp(gate[:, :, t])[..., None, None]
        held = (state * k[:, :, t, :, None]).sum(-2)
        update = beta[:, :, t, None] * (v[:, :, t] - held)
        state = state + k[:, :, t, :, None] * update[:, :, None, :]
        out.append(((q[:, :, t] * scale)[..., None] * state).sum(-2)[:, :, None])
    return torch.cat(out, 2)


def chunked(
    f: Functions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    scale: float,
    *,
    width: int,
    dtype: torch.dtype = torch.float32,
    inverted: bool = True,
    keys_scaled: bool = False,
) -> Tensor:
    """By chunks so wide, what products take rounded to ``dtype``.

    ``inverted``: by the inverse of each chunk's matrix, else by substitution; ``keys_scaled``: keys meet beta and the
    decays before a product, not its result.
    """

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    state, out = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3]), [v[:, :, :0]]
    for first in range(0, k.shape[2], width):
        keys, values, queries = (x[:, :, first : first + width] for x in (k, v, q))
        level, step = gate[:, :, first : first + width].cumsum(-1), beta[:, :, first : first + width, None]
        seen = torch.ones(keys.shape[2], keys.shape[2]).tril().bool()
        decay = f.exp(torch.where(seen, level[..., :, None] - level[..., None, :], 0.0))
        pairs = cast(keys * step) @ keys.mT if keys_scaled else (keys @ keys.mT) * step
        lower = torch.where(seen.tril(-1), pairs * decay, 0.0)
        here = f.exp(level)[..., None]
        if inverted:
            inverse = torch.eye(keys.shape[2]).expand(lower.shape).clone()
            for row in range(1, keys.shape[2]):
                inverse[..., row, :row] = -(lower[..., row, None, :row] @ inverse[..., :row, :row])[..., 0, :]
            inverse = cast(inverse)
            updates = cast(inverse @ cast(values * step)) - cast(inverse @ cast(keys * step * here)) @ cast(state)
        else:
            updates = step * (values - here * (keys @ cast(state)))
            for row in range(1, keys.shape[2]):
                known = lower[..., row, None, :row] @ updates[..., :row, :]
                updates = torch.cat(
                    [updates[..., :row, :], updates[..., row, None, :] - known, updates[..., row + 1 :, :]], -2
                )
        scores = torch.where(seen, (queries @ keys.mT) * decay, 0.0)
        out.append(((queries @ cast(state)) * here + cast(scores) @ cast(updates)) * scale)
        rest, whole = f.exp(level[..., -1:] - level)[..., None], f.exp(level[..., -1:])[..., None]
        added = cast(keys * rest).mT @ cast(updates) if keys_scaled else keys.mT @ cast(updates * rest)
        state = state * whole + added
    return torch.cat(out, 2)


def delta_rules(
    f: Functions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    *,
    scale: float,
    normalized: bool,
    widths: Sequence[int] = (1, 4, 16, 64),
) -> Iterator[tuple[str, Any]]:
    """All of them, in chunks so wide, in the format of q, k and v; results [B, T, H, Dv] before they are stored."""
    dtype = q.dtype
    q, k, v, gate, beta = (x.float().transpose(1, 2) for x in (q, k, v, gate, beta))
    if normalized:
        q, k = ((x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).to(dtype).float() for x in (q, k))
    yield "recurrent", recurrent(f, q, k, v, gate, beta, scale).transpose(1, 2)
    for width in widths:
        for inverted in (False, True):
            for keys_scaled in (False, True):
                found = chunked(
                    f, q, k, v, gate, beta, scale, width=width, dtype=dtype, inverted=inverted, keys_scaled=keys_scaled
                )
                yield f"chunks of {width}, {inverted=}, {keys_scaled=}", found.transpose(1, 2)
