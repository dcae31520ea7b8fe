"""Inputs on which the zoo's faults show: ordinary ones, large and tiny ones, and special values."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.reference.products import AWQ_ORDER
from tests.reference.rows import FUNCTIONS

from .entry import Entry

Make = Callable[..., Tensor]
Inputs = Iterator[tuple[Tensor, ...]]
SPECIAL = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Probe:
    """The arguments of one call."""

    inputs: tuple[Tensor, ...]
    options: dict[str, Any]

    def copy(self) -> Probe:
        """The same in fresh buffers, strides and the memory behind the last element included."""
        return Probe(tuple(with_strides(x) for x in self.inputs), self.options)


def with_strides(x: Tensor) -> Tensor:
    """A copy of x in a storage of its own, at the same offset."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def same_bytes(one: Probe, other: Probe) -> bool:
    """Whether all buffers hold the same bytes, those behind the last element included."""
    stores = [[torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in y.inputs] for y in (one, other)]
    return all(map(torch.equal, *stores))


def strided(x: Tensor) -> Tensor:
    """The same values in every other column of a buffer, or transposed where x has two dimensions."""
    if x.ndim == 2:
        return x.T.contiguous().T
    if x.ndim == 0:
        return x
    buffer = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def special(x: Tensor, value: float) -> Tensor:
    """x with one element replaced, the last but one of the last row where there is one."""
    y = x.clone()
    if y.numel():
        y.view(-1)[max(y.numel() - 2, 0)] = value
    return y


def rows(make: Make) -> Inputs:
    """x[R,N]: what softmax and the activations are probed with."""
    for shape in ((5, 300), (1, 7), (3, 0), (17, 65)):
        yield (make(*shape, scale=3.0),)
    yield (make(9, 300, scale=40.0),)
    yield (make(9, 300, scale=40.0) - 2e4,)
    for shape, scale in (((64, 300), 1.0), ((16, 700), 3.0), ((4, 50), 1e5), ((4, 50), 1e-38)):
        yield (make(*shape, scale=scale),)
    for value in SPECIAL:
        yield (special(make(3, 70), value),)
    yield (make(3, 70).fill_(-math.inf),)
    yield (torch.nn.functional.pad(make(3, 33), (0, 2))[:, :33],)


def of_function(make: Make) -> Inputs:
    """Numbers of every size, and the special ones."""
    for scale in (1.0, 3.0, 40.0, 1e-3, 1e-38, 1e4):
        yield (make(9, 300, scale=scale),)
    yield (make(3, 0),)
    x = make(2, 5)
    x[0] = torch.tensor([*SPECIAL, 0.0, -1.0])
    yield (x,)


def norms(make: Make, others: int, residual: bool = False) -> Inputs:
    """x[R,N], perhaps a residual, and `others` vectors [N]."""
    for shape, scale, mean in (
        ((5, 77), 1.0, 0.0), ((6, 300), 1.0, 500.0), ((3, 64), 1e-4, 0.0), ((3, 130), 300.0, 0.0), ((2, 40), 0.0, 3.0),
        ((4, 0), 1.0, 0.0), ((3, 1), 1.0, 0.0), ((3, 40), 1e-39, 0.0),
    ):  # fmt: skip
        x = tuple(make(*shape, scale=scale) + mean for _ in range(1 + residual))
        yield (*x, *(make(shape[1]) for _ in range(others)))
    yield (*(make(3, 40) for _ in range(1 + residual)), *(make(40, scale=1e-39) for _ in range(others)))
    for value in (math.nan, math.inf):
        x = (special(make(3, 70), value), *(make(3, 70) for _ in range(residual)))
        yield (*x, *(make(70) for _ in range(others)))


def of_softmax(make: Make) -> Inputs:
    """Rows of weights, and gradients of them."""
    for shape in ((5, 300), (1, 7), (17, 65), (0, 4)):
        yield torch.softmax(make(*shape).float(), 1).to(make(1).dtype), make(*shape)
    yield make(3, 130), make(3, 130, scale=30.0) + 100


def of_norm(make: Make) -> Inputs:
    """x[R,N], weight[N], dy[R,N]; the third has a large mean, the last tiny numbers."""
    for (r, n), mean in (((37, 77), 0.0), ((6, 300), 0.0), ((5, 40), 300.0)):
        yield make(r, n) + mean, make(n), make(r, n)
    yield make(4, 9, scale=1e-3), make(9), make(4, 9)


def of_swiglu(make: Make) -> Inputs:
    """gate, up and dy."""
    for shape, scale in (((5, 77), 3.0), ((2, 300), 1.0), ((0, 3), 1.0)):
        yield make(*shape, scale=scale), make(*shape), make(*shape)
    for value in SPECIAL:
        gate = make(3, 9)
        gate[1, 2] = value
        yield gate, make(3, 9), make(3, 9)


def gated(make: Make) -> Inputs:
    """gate[R,N], up[R,N]."""
    for shape, scale in (((5, 77), 3.0), ((2, 300), 20.0), ((0, 3), 1.0)):
        yield make(*shape, scale=scale), make(*shape, scale=scale)
    for value in SPECIAL:
        yield special(make(3, 9), value), make(3, 9)
        yield make(3, 9), special(make(3, 9), value)


def rotations(make: Make) -> Inputs:
    """x[B,S,H,D] and the angles' cosines and sines [S,D/2]."""
    for b, s, h, d in ((2, 5, 3, 16), (1, 33, 1, 2), (1, 0, 2, 8)):
        angle = make(s, d // 2, scale=3.0).float()
        x = make(b, s, h, d)
        yield x, angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def labelled(make: Make, options: dict[str, Any]) -> Inputs:
    """Logits and labels, some of them none; the third has no label at all, the last NaN where nothing is read."""
    none = options.get("ignore_index", -100)
    for tokens, classes, share in ((9, 130, 0.3), (5, 7, 0.0), (4, 6, 1.0), (17, 33, 0.5), (6, 40, 0.5)):
        target = torch.randint(0, classes, (tokens,))
        target[torch.rand(tokens) < share] = none
        logits = make(tokens, classes, scale=4.0)
        if (tokens, classes) == (17, 33):
            logits = logits + 100
        if (tokens, classes) == (6, 40):
            target[2] = none
            logits[2, 3] = math.nan
        yield logits, target


def products(make: Make, bias: bool = False) -> Inputs:
    """a[M,K], b[K,N], or x[M,K], weight[N,K], bias[N]."""
    for (m, k, n), scale, magnitudes in (
        ((17, 300, 33), 1.0, False), ((5, 515, 9), 1.0, True), ((1, 70, 5), 1.0, False), ((9, 40, 40), 1.0, False),
        ((6, 128, 6), 200.0, False), ((3, 0, 4), 1.0, False), ((0, 5, 4), 1.0, False),
    ):  # fmt: skip
        a, b = make(m, k, scale=scale), make(*((n, k) if bias else (k, n)), scale=scale)
        pair = (a.abs(), b.abs()) if magnitudes else (a, b)
        yield (*pair, make(n)) if bias else pair
    for value in (math.nan, math.inf):
        a, b = special(make(3, 70), value), make(*((5, 70) if bias else (70, 5)))
        yield (a, b, make(5)) if bias else (a, b)


def positive(*shape: int) -> Tensor:
    """Float32 scales around one, of unequal size."""
    return torch.randn(shape).exp()


def fp8_products(make: Make, granularity: str) -> Inputs:
    """fp8 operands and their scales."""
    for m, k, n in ((33, 300, 260), (5, 515, 130), (1, 7, 3), (2, 0, 3)):
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "tensor": ((), ()),
            "row": ((m, 1), (1, n)),
            "block": ((m, -(-k // 128)), (-(-k // 128), -(-n // 128))),
        }
        left, right = shapes[granularity]
        yield make(m, k), make(k, n), positive(*left), positive(*right)


def int8_products(make: Make) -> Inputs:
    """int8 operands and their scales."""
    for m, k, n in ((17, 300, 33), (1, 5, 3), (2, 0, 3)):
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
        yield a, b, positive(m, 1), positive(1, n)


def pack(nibbles: Tensor) -> Tensor:
    """Eight nibbles of the last dimension in one int32, the first lowest."""
    return (nibbles << 4 * torch.arange(8)).sum(-1).to(torch.int32)


def int4_products(make: Make, packing: str) -> Inputs:
    """x[M,K] and packed random codes, zero-points and scales."""
    for m, k, n, group in ((5, 128, 16, 32), (1, 16, 8, 16), (3, 64, 24, 8)):
        codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // group, n))
        order = list(AWQ_ORDER if packing == "awq" else range(8))
        packed_zeros = pack(zeros.reshape(-1, n // 8, 8)[..., order])
        if packing == "plain":
            qweight, packed_zeros = (codes[0::2] + 16 * codes[1::2]).to(torch.uint8), zeros.to(torch.uint8)
        elif packing == "awq":
            qweight = pack(codes.reshape(k, n // 8, 8)[..., order])
        else:
            qweight = pack(codes.reshape(k // 8, 8, n).transpose(1, 2))
        yield make(m, k), qweight, make(k // group, n, scale=0.1), packed_zeros


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
        (17, 320, 33, 1, 0.2), (3, 64, 5, 1, 0.2), (1, 16, 2, 1, 0.2), (5, 64, 3, 896, -448.0),
    ):  # fmt: skip
        a, b = (torch.randint(0, 256, (size, k // 2), dtype=torch.uint8) for size in (m, n))
        blocks = (torch.rand(size, k // 16).mul(span).add(least).to(torch.float8_e4m3fn) for size in (m, n))
        yield a, b, *blocks, torch.tensor(0.3), torch.tensor(1.7)


def sparse_products(make: Make) -> Inputs:
    """Values, ascending indices in groups of four, and a dense operand."""
    for m, k, n in ((17, 320, 33), (3, 64, 5), (1, 4, 2)):
        index = torch.rand(m, k // 4, 4).argsort(dim=-1)[..., :2].sort(dim=-1).values
        yield make(m, k // 2), index.reshape(m, k // 2).to(torch.uint8), make(k, n)


def attentions(make: Make) -> Inputs:
    """q, k, v; the second has queries that see nothing, the sixth scores far below zero."""
    sizes = ((2, 4, 2, 9, 70, 16, 8), (1, 2, 1, 20, 9, 8, 5), (1, 6, 2, 5, 130, 33, 33), (1, 1, 1, 3, 0, 8, 8))
    for (b, h, hkv, sq, sk, d, dv), scale in ((sizes[0], 1.0), *((s, 2.0) for s in sizes[1:]), (sizes[0], 12.0)):
        yield make(b, h, sq, d, scale=scale), make(b, hkv, sk, d, scale=scale), make(b, hkv, sk, dv) + 1
    yield make(1, 2, 6, 16).sign() + 150, make(1, 2, 70, 16).sign() - 150, make(1, 2, 70, 8)
    for value in (math.nan, math.inf):
        yield make(1, 2, 6, 16), make(1, 1, 6, 16), special(make(1, 1, 6, 8), value)
        yield special(make(1, 2, 6, 16), math.nan), make(1, 1, 6, 16), make(1, 1, 6, 8)
    yield make(1, 2, 6, 16), make(1, 1, 6, 16), make(1, 1, 6, 8, scale=3e4)


def of_attention(make: Make) -> Inputs:
    """q, k, v and dout; the second has queries that see nothing."""
    for b, h, groups, queries, keys, d, dv in (
        (2, 4, 2, 9, 70, 16, 8), (1, 2, 1, 20, 9, 8, 5), (1, 6, 2, 5, 5, 8, 8), (1, 2, 2, 33, 33, 16, 16),
    ):  # fmt: skip
        q, k = make(b, h, queries, d, scale=1.5), make(b, groups, keys, d)
        yield q, k, make(b, groups, keys, dv), make(b, h, queries, dv)


def decodes(make: Make, cache: torch.dtype) -> Inputs:
    """Caches of which no slot is read behind the last token: NaN is there; the first also has an empty sequence."""
    for lengths, heads, groups, d, pages, page in (
        ((0, 9, 5, 12), 6, 2, 8, 14, 4), ((8,), 2, 1, 33, 5, 8), ((1, 64, 0, 0), 4, 4, 16, 9, 16),
        ((70, 3), 2, 2, 16, 90, 1),
    ):  # fmt: skip
        most = -(-max(lengths) // page)
        table = torch.randperm(pages - 1)[: most * len(lengths)].tolist()
        table = torch.tensor([table[i % len(table)] for i in range(most * len(lengths))]).reshape(-1, most)
        free = torch.ones(pages, page, dtype=torch.bool)
        for b, length in enumerate(lengths):
            used = torch.arange(length)
            free[table[b, used // page], used % page] = False
            table[b, -(-length // page) :] = pages - 1
        k, v = (make(pages, page, groups, d, scale=2.0).masked_fill(free[:, :, None, None], math.nan) for _ in range(2))
        caches = (k.float().to(cache), (v.float() + 1).to(cache))
        yield make(len(lengths), heads, d, scale=2.0), *caches, table.int(), torch.tensor(lengths).int()
    for q, k, v, pages, length in (
        (make(1, 2, 8), make(2, 4, 1, 8), special(make(2, 4, 1, 8), math.nan), [1, 1], 8),
        (make(1, 2, 16).sign() + 30, make(2, 64, 2, 16).sign() - 30, make(2, 64, 2, 16).float() * 1e4, [1, 0], 128),
    ):
        yield q, k.float().to(cache), v.float().to(cache), torch.tensor([pages]).int(), torch.tensor([length]).int()


def ragged(make: Make) -> Inputs:
    """Sequences of several lengths, empty ones among them; the third has scores far below and above zero."""
    for lengths_q, lengths_k, heads, groups, d, scale in (
        ((5, 0, 9, 3), (7, 4, 9, 0), 6, 2, 8, 1.0), ((4, 6), (2, 11), 2, 1, 40, 2.0), ((3, 8), (20, 33), 4, 2, 64, 3.0),
        ((7,), (7,), 1, 1, 8, 1.0),
    ):  # fmt: skip
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
            lse[number] = lse[-1] = -math.inf
            out[lse == -math.inf] = math.nan
        yield outs[0], lses[0], outs[1], lses[1]
    for difference in (-20.0, -60.0):
        yield torch.zeros_like(make(2, 1, 8)), torch.ones(2, 1), make(2, 1, 8) + 100, torch.full((2, 1), 1 + difference)


def shards(make: Make) -> Inputs:
    """Ranks by columns; in one case the sum reaches the end of float16."""
    for ranks, columns in ((1, 7), (3, 33), (8, 130), (7, 64), (16, 257)):
        yield (make(ranks, columns),)
    yield (make(4, 50).abs() * 3000 + 20000,)


def logits(make: Make) -> Inputs:
    """Logits whose experts are all apart; the last have sigmoids that all underflow."""
    for tokens, experts, shift in ((9, 60, 0.0), (1, 4, 0.0), (0, 8, 0.0), (5, 8, -120.0)):
        apart = torch.stack([torch.randperm(experts) for _ in range(tokens)]) if tokens else torch.zeros(0, experts)
        step = 1.0 if shift else 0.125
        yield ((apart * step + 0.03 * torch.rand(tokens, experts) + shift).to(make(1).dtype),)


def mixtures(make: Make) -> Inputs:
    """Tokens with experts that repeat, and experts without tokens."""
    for tokens, d, f, experts, k in ((13, 24, 20, 5, 2), (2, 40, 130, 6, 2), (5, 8, 8, 2, 3), (0, 8, 8, 3, 2)):
        ids = torch.randint(0, experts, (tokens, k), dtype=torch.int32)
        ids[:1] = experts - 1
        yield make(tokens, d), make(experts, 2 * f, d), make(experts, d, f), torch.rand(tokens, k) + 0.1, ids


def quantized(make: Make, largest: float) -> Inputs:
    """x[R,N]: ordinary numbers, numbers of one sign, and midpoints between codes whose scale is a power of two."""
    for shape in ((5, 300), (1, 7), (3, 64), (17, 65), (4, 129)):
        yield (make(*shape, scale=3.0),)
    yield (torch.cat([make(6, 63), torch.full((6, 1), 50.0).to(make(1).dtype)], dim=1),)
    yield (make(6, 200).abs() + 2,)
    yield (-make(6, 200).abs() - 2,)
    if largest == 448:  # the midpoints of e4m3
        exact = torch.tensor([17.0, 18.0, 19.0, 21.0, 23.0, 27.0, 29.0, 31.0, 0.5, 1.0625, 1.1875, 100.0, 200.0, 216.0])
        half = torch.cat([torch.full((1,), 448.0), exact, -exact])
        yield (half[None].expand(3, -1).contiguous().to(make(1).dtype),)
        return
    half = torch.arange(-largest, largest)[None].expand(3, -1) + 0.5
    half = half.gather(1, torch.randint(0, half.shape[1], (3, 64)))
    half[:, ::8] = largest
    half[:, 4::8] = -largest if largest > 15 else largest - 15
    yield ((half / 4).to(make(1).dtype),)
    if largest < 15:
        yield (torch.tensor([[7.5, -7.5, 2.0, -3.0]]).to(make(1).dtype),)


MAKERS: dict[str, Callable[[Make, dict[str, Any]], Inputs]] = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "gelu", "silu"), lambda make, _: rows(make)),
    **dict.fromkeys(FUNCTIONS, lambda make, _: of_function(make)),
    **dict.fromkeys(("layernorm_backward", "rmsnorm_backward"), lambda make, _: of_norm(make)),
    **dict.fromkeys(("cross_entropy", "cross_entropy_backward"), labelled),
    "softmax_backward": lambda make, _: of_softmax(make),
    "layernorm": lambda make, _: norms(make, 2),
    "rmsnorm": lambda make, _: norms(make, 1),
    "add_rmsnorm": lambda make, _: norms(make, 1, residual=True),
    "swiglu": lambda make, _: gated(make),
    "swiglu_backward": lambda make, _: of_swiglu(make),
    "rope": lambda make, _: rotations(make),
    "linear": lambda make, _: products(make, bias=True),
    "gemm": lambda make, _: products(make),
    "gemm_fp8": lambda make, options: fp8_products(make, options["granularity"]),
    "gemm_int8": lambda make, _: int8_products(make),
    "gemm_int4": lambda make, options: int4_products(make, options["packing"]),
    "gemm_mxfp8": lambda make, _: mx_products(make),
    "gemm_nvfp4": lambda make, _: nv_products(make),
    "gemm_2to4": lambda make, _: sparse_products(make),
    "attention": lambda make, _: attentions(make),
    "attention_backward": lambda make, _: of_attention(make),
    "attention_varlen": lambda make, _: ragged(make),
    "merge_states": lambda make, _: states(make),
    "all_reduce": lambda make, _: shards(make),
    "moe_route": lambda make, _: logits(make),
    "moe": lambda make, _: mixtures(make),
    "quantize_fp8": lambda make, _: quantized(make, 448.0),
    "quantize_int8": lambda make, _: quantized(make, 127.0),
    "quantize_int4": lambda make, _: quantized(make, 7.0),
}
"""By spec the inputs that it is probed with, under some options; `decodes` makes those of a paged cache."""


def option_sets(options: dict[str, list[Any]], most: int) -> list[dict[str, Any]]:
    """Every combination of options, or a sample of `most`."""
    every = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    return every if len(every) <= most else random.Random(1).sample(every, most)


def probes_of(entry: Entry, most_options: int = 6) -> Iterator[Probe]:
    """The probes of an entry, each also with other strides, with options that its table allows."""
    given = entry.examine.get("dtype", "float32")
    dtype, cache = (getattr(torch, given[name] if isinstance(given, dict) else given) for name in ("q", "k_cache"))

    def make(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(dtype)

    for chosen in option_sets(entry.examine.get("options", {}), most_options):
        torch.manual_seed(7)
        inputs_of = decodes(make, cache) if entry.spec == "attention_decode" else MAKERS[entry.spec](make, chosen)
        for number, inputs in enumerate(inputs_of):
            options = dict(chosen)
            if options.get("alibi"):
                options["slopes"] = torch.rand(inputs[0].shape[1]) + 0.1
            if "sinks" in options:
                options["sinks"] = torch.randn(inputs[0].shape[1]) if options["sinks"] else None
            yield Probe(inputs, options)
            if number in (0, 1):
                yield Probe(tuple(strided(x) for x in inputs), options)
