"""Honest float32 kernels of matrix products, plain and quantised, and of the mixture of experts."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.golden.float32 import SUMS, Functions, Sum, fma, forward, single

Tensor = torch.Tensor
Dot = Callable[[Tensor, Tensor], Tensor]


def _expanded(add: Sum) -> Dot:
    """Products rounded, then added in some order."""
    return lambda a, b: add(a[:, None, :] * b.T[None])


def _fused(a: Tensor, b: Tensor) -> Tensor:
    """One fused multiply-add a term."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for k in range(a.shape[1]):
        total = fma(a[:, k : k + 1], b[k : k + 1], total)
    return total


def _split(parts: int, dot: Dot) -> Dot:
    """Split-K: partial products, added at the end."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        size = max(1, -(-a.shape[1] // parts))
        partial = [dot(a[:, k : k + size], b[k : k + size]) for k in range(0, a.shape[1], size)]
        return forward(torch.stack(partial, -1)) if partial else a.new_zeros(a.shape[0], b.shape[1])

    return product


DOTS: dict[str, Dot] = {name: _expanded(add) for name, add in SUMS.items()} | {
    "fused": _fused,
    "fused, backwards": lambda a, b: _fused(a.flip(1), b.flip(0)),
    "split-K": _split(4, _fused),
    "chunks of 32, fused": lambda a, b: _split(max(1, a.shape[1] // 32), _fused)(a, b),
    "torch's product": lambda a, b: a @ b,
}


def gemms(f: Functions, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, dot in DOTS.items():
        yield name, dot(a, b)


def linears(f: Functions, x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, dot in DOTS.items():
        yield f"{name}, bias last", dot(x, weight.T) + bias
    yield (
        "bias first",
        SUMS["forward"](torch.cat([bias.expand(x.shape[0], -1)[..., None], x[:, None] * weight[None]], -1)),
    )
    total = bias.expand(x.shape[0], -1)
    for k in range(x.shape[1]):
        total = fma(x[:, k : k + 1], weight.T[k : k + 1], total)
    yield "bias first, fused", total


def fp8_gemms(
    f: Functions, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, *, granularity: str
) -> Iterator[tuple[str, Tensor]]:
    a, b = a.float(), b.float()
    if granularity == "block":
        yield from _block_scaled(a, b, sa, sb)
        return
    for name, dot in DOTS.items():
        product = dot(a, b)
        yield f"{name} sa sb", product * sa * sb
        yield f"{name} sb sa", product * sb * sa
        yield f"{name} (sa sb)", product * (sa * sb)
        yield f"scaled first, {name}", dot(a * sa, b * sb)
        yield f"a scaled first, {name}", dot(a * sa, b) * sb


def _block_scaled(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Iterator[tuple[str, Tensor]]:
    columns = torch.arange(b.shape[1]) // 128
    for name, dot in DOTS.items():
        total = a.new_zeros(a.shape[0], b.shape[1])
        fused = total
        for block in range(sa.shape[1]):
            part = dot(a[:, block * 128 : (block + 1) * 128], b[block * 128 : (block + 1) * 128])
            scale = sa[:, block : block + 1] * sb[block, columns]
            total = total + part * sa[:, block : block + 1] * sb[block, columns]
            fused = fma(part, scale, fused)
        yield f"{name}, each block scaled", total
        yield f"{name}, each block scaled, fused", fused


def int8_gemms(f: Functions, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Iterator[tuple[str, Tensor]]:
    exact = single(a.double() @ b.double())
    yield "int32, sa, sb", exact * sa * sb
    yield "int32, (sa sb)", exact * (sa * sb)
    for name, dot in DOTS.items():
        yield f"float32 {name}", dot(a.float(), b.float()) * sb * sa
        yield f"dequantised, {name}", dot(a.float() * sa, b.float() * sb)


def int4_gemms(f: Functions, x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Iterator[tuple[str, Tensor]]:
    """``codes``, ``zeros`` [K, N] and ``scales`` [K, N] unpacked; kernels differ in where the zero-point comes off."""
    groups = (scales.diff(dim=0) != 0).any(1).nonzero()[:, 0].tolist()
    cuts = [0, *(place + 1 for place in groups), len(scales)]
    for name, dot in DOTS.items():
        yield f"(q - z) s, {name}", dot(x, (codes - zeros) * scales)
        yield f"q s - z s, {name}", dot(x, codes * scales - zeros * scales)
        yield f"fma(q, s, -z s), {name}", dot(x, fma(codes, scales, -(zeros * scales)))
        late = apart = x.new_zeros(x.shape[0], codes.shape[1])
        for start, stop in itertools.pairwise(cuts):
            part, scale = x[:, start:stop], scales[start]
            late = late + dot(part, codes[start:stop] - zeros[start:stop]) * scale
            apart = apart + (dot(part, codes[start:stop]) - SUMS["pairwise"](part)[:, None] * zeros[start]) * scale
        yield f"s after each group, {name}", late
        yield f"z off the sum of x, {name}", apart


def moes(
    f: Functions, x: Tensor, up_down: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Iterator[tuple[str, Any]]:
    inner = up_down.shape[1] // 2
    for name, dot in DOTS.items():
        for early in (False, True):
            rows = []
            for token in range(x.shape[0]):
                parts = []
                for choice in range(ids.shape[1]):
                    expert, share = int(ids[token, choice]), weights[token, choice]
                    projected = dot(x[token : token + 1], up_down[expert].T)
                    gate, up = projected[:, :inner], projected[:, inner:]
                    hidden = gate * f.sigmoid(gate) * up
                    made = dot(hidden * share if early else hidden, down[expert].T)
                    parts.append(made if early else made * share)
                rows.append(SUMS["backward" if early else "forward"](torch.stack(parts, -1)))
            yield f"{name}, weighted {'before' if early else 'after'}", torch.cat(rows)
