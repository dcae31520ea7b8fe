"""Inputs on which the faults of quantisers, microscaled and sparse products, merging and sums over ranks show."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Make = Callable[..., Tensor]
Inputs = Iterator[tuple[Tensor, ...]]


def rows(make: Make, largest: float) -> Inputs:
    """x[R,N]: ordinary numbers, numbers of one sign, and midpoints between codes whose scale is a power of two."""
    for shape in ((5, 300), (1, 7), (3, 64), (17, 65), (4, 129)):
        yield (make(*shape, scale=3.0),)
    yield (torch.cat([make(6, 63), torch.full((6, 1), 50.0).to(make(1).dtype)], dim=1),)
    yield (make(6, 200).abs() + 2,)
    yield (-make(6, 200).abs() - 2,)
    half = torch.arange(-largest, largest)[None].expand(3, -1) + 0.5
    half = half.gather(1, torch.randint(0, half.shape[1], (3, 64)))
    half[:, ::8] = largest
    half[:, 4::8] = -largest if largest > 15 else largest - 15
    yield ((half / 4).to(make(1).dtype),)
    if largest < 15:
        yield (torch.tensor([[7.5, -7.5, 2.0, -3.0]]).to(make(1).dtype),)


def fp8_rows(make: Make) -> Inputs:
    """The same; the midpoints are those of e4m3."""
    yield from list(rows(make, 127.0))[:-1]
    exact = torch.tensor([17.0, 18.0, 19.0, 21.0, 23.0, 27.0, 29.0, 31.0, 0.5, 1.0625, 1.1875, 100.0, 200.0, 216.0])
    half = torch.cat([torch.full((1,), 448.0), exact, -exact])
    yield (half[None].expand(3, -1).contiguous().to(make(1).dtype),)


def scales(*shape: int, most: int = 6) -> Tensor:
    """Powers of two."""
    return torch.exp2(torch.randint(-most, most, shape).float())


def mx_products(make: Make) -> Inputs:
    """e4m3 operands and e8m0 scales, then scales far from one, and those of a's blocks 2^-127."""
    for m, k, n, most in ((17, 320, 33, 6), (3, 64, 5, 6), (1, 32, 2, 6), (5, 64, 3, 30)):
        a, b = (torch.randn(shape).mul(8).to(torch.float8_e4m3fn) for shape in ((m, k), (k, n)))
        yield a, b, *(scales(*shape, most=most).to(torch.float8_e8m0fnu) for shape in ((m, k // 32), (k // 32, n)))
    least, large = torch.full((5, 2), 2.0**-127), torch.full((2, 3), 2.0**112)
    yield a, b, least.to(torch.float8_e8m0fnu), large.to(torch.float8_e8m0fnu)


def nv_products(make: Make) -> Inputs:
    """Packed e2m1 operands, e4m3 scales, in the last case large and of either sign, and multipliers."""
    for m, k, n, span, least in (
        (17, 320, 33, 1, 0.2),
        (3, 64, 5, 1, 0.2),
        (1, 16, 2, 1, 0.2),
        (5, 64, 3, 896, -448.0),
    ):
        a, b = (torch.randint(0, 256, (size, k // 2), dtype=torch.uint8) for size in (m, n))
        blocks = (torch.rand(size, k // 16).mul(span).add(least).to(torch.float8_e4m3fn) for size in (m, n))
        yield a, b, *blocks, torch.tensor(0.3), torch.tensor(1.7)


def sparse_products(make: Make) -> Inputs:
    """Values, ascending places in groups of four, and a dense operand."""
    for m, k, n in ((17, 320, 33), (3, 64, 5), (1, 4, 2)):
        places = torch.rand(m, k // 4, 4).argsort(dim=-1)[..., :2].sort(dim=-1).values
        yield make(m, k // 2), places.reshape(m, k // 2).to(torch.uint8), make(k, n)


def ragged(make: Make) -> Inputs:
    """Sequences of several lengths, empty ones among them; the third has scores far below and above zero."""
    for lengths_q, lengths_k, heads, groups, d, scale in (
        ((5, 0, 9, 3), (7, 4, 9, 0), 6, 2, 8, 1.0),
        ((4, 6), (2, 11), 2, 1, 40, 2.0),
        ((3, 8), (20, 33), 4, 2, 64, 3.0),
        ((7,), (7,), 1, 1, 8, 1.0),
    ):
        cu = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)]
        tq, tk = int(cu[0][-1]), int(cu[1][-1])
        yield make(tq, heads, d, scale=scale), make(tk, groups, d, scale=scale), make(tk, groups, d) + 1, *cu
    yield make(2, 1, 8), make(700, 1, 8), make(700, 1, 8) + 1, torch.tensor([0, 2]).int(), torch.tensor([0, 700]).int()
    cu = torch.tensor([0, 6, 12]).int()
    yield make(12, 2, 64).sign() + 30, make(12, 2, 64).sign() - 30, make(12, 2, 64), cu, cu


def states(make: Make) -> Inputs:
    """Outputs and log-sum-exps; empty states hold NaN, and both may be empty."""
    cases = ((9, 3, 16, 2.0, 0.0), (5, 1, 33, 60.0, 0.0), (4, 2, 8, 1.0, 3000.0))
    if make(1).dtype != torch.float32:  # to whose accuracy a log-sum-exp there is too coarse
        cases += ((4, 2, 8, 1.0, -6e4),)
    for tokens, heads, d, spread, mean in cases:
        outs = [make(tokens, heads, d) for _ in range(2)]
        lses = [torch.randn(tokens, heads) * spread + mean for _ in range(2)]
        for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
            lse[number] = -math.inf
            lse[-1] = -math.inf
            out[lse == -math.inf] = math.nan
        yield outs[0], lses[0], outs[1], lses[1]
    for difference in (-20.0, -60.0):
        yield torch.zeros_like(make(2, 1, 8)), torch.ones(2, 1), make(2, 1, 8) + 100, torch.full((2, 1), 1 + difference)


def shards(make: Make) -> Inputs:
    """Ranks by columns; in one case the sum reaches the end of float16."""
    for ranks, columns in ((1, 7), (3, 33), (8, 130), (7, 64), (16, 257)):
        yield (make(ranks, columns),)
    yield (make(4, 50).abs() * 3000 + 20000,)


MAKERS: dict[str, Callable[[Make], Inputs]] = {
    "quantize_fp8": fp8_rows,
    "quantize_int8": lambda make: rows(make, 127.0),
    "quantize_int4": lambda make: rows(make, 7.0),
    "gemm_mxfp8": mx_products,
    "gemm_nvfp4": nv_products,
    "gemm_2to4": sparse_products,
    "attention_varlen": ragged,
    "merge_states": states,
    "all_reduce": shards,
}
