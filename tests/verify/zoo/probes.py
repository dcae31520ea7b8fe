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

from . import probes_gradients
from .entry import Entry
from .probes_quantized import MAKERS

Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Probe:
    """The arguments of one call."""

    inputs: tuple[Tensor, ...]
    options: dict[str, Any]

    def copy(self) -> Probe:
        """The same in fresh buffers, strides and what lies behind the last element included."""
        return Probe(tuple(with_strides(x) for x in self.inputs), self.options)


def with_strides(x: Tensor) -> Tensor:
    """A copy of x in a storage of its own, at the same place."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage().clone())
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def same_bytes(one: Probe, other: Probe) -> bool:
    """Whether all buffers hold the same bytes, those behind the last element included."""
    pairs = zip(one.inputs, other.inputs, strict=True)
    return all(torch.equal(bytes_of(x), bytes_of(y)) for x, y in pairs)


def bytes_of(x: Tensor) -> Tensor:
    """The whole storage of x as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def strided(x: Tensor) -> Tensor:
    """The same values in every other column of a buffer, or turned where x has two dimensions."""
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


def rows(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """x[R,N]: what softmax and the activations are probed with."""
    for shape in ((5, 300), (1, 7), (3, 0), (17, 65)):
        yield (make(*shape, scale=3.0),)
    yield (make(9, 300, scale=40.0),)
    yield (make(9, 300, scale=40.0) - 2e4,)
    yield (make(64, 300),)
    yield (make(16, 700, scale=3.0),)
    yield (make(4, 50, scale=1e5),)
    yield (make(4, 50, scale=1e-38),)
    for value in (math.nan, math.inf, -math.inf):
        yield (special(make(3, 70), value),)
    yield (make(3, 70).fill_(-math.inf),)
    yield (torch.nn.functional.pad(make(3, 33), (0, 2))[:, :33],)


def norms(make: Make, others: int, residual: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """x[R,N], perhaps a residual, and `others` vectors [N]."""
    for shape, scale, mean in (
        ((5, 77), 1.0, 0.0),
        ((6, 300), 1.0, 500.0),
        ((3, 64), 1e-4, 0.0),
        ((3, 130), 300.0, 0.0),
        ((2, 40), 0.0, 3.0),
        ((4, 0), 1.0, 0.0),
        ((3, 1), 1.0, 0.0),
        ((3, 40), 1e-39, 0.0),
    ):
        x = tuple(make(*shape, scale=scale) + mean for _ in range(1 + residual))
        yield (*x, *(make(shape[1]) for _ in range(others)))
    yield (*(make(3, 40) for _ in range(1 + residual)), *(make(40, scale=1e-39) for _ in range(others)))
    for value in (math.nan, math.inf):
        x = (special(make(3, 70), value), *(make(3, 70) for _ in range(residual)))
        yield (*x, *(make(70) for _ in range(others)))


def gated(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """gate[R,N], up[R,N]."""
    for shape, scale in (((5, 77), 3.0), ((2, 300), 20.0), ((0, 3), 1.0)):
        yield make(*shape, scale=scale), make(*shape, scale=scale)
    for value in (math.nan, math.inf, -math.inf):
        yield special(make(3, 9), value), make(3, 9)
        yield make(3, 9), special(make(3, 9), value)


def rotations(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """x[B,S,H,D] and the angles' cosines and sines [S,D/2]."""
    for b, s, h, d in ((2, 5, 3, 16), (1, 33, 1, 2), (1, 0, 2, 8)):
        angle = make(s, d // 2, scale=3.0).float()
        x = make(b, s, h, d)
        yield x, angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def products(make: Make, bias: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """a[M,K], b[K,N], or x[M,K], weight[N,K], bias[N]."""
    for (m, k, n), scale, positive in (
        ((17, 300, 33), 1.0, False),
        ((5, 515, 9), 1.0, True),
        ((1, 70, 5), 1.0, False),
        ((9, 40, 40), 1.0, False),
        ((6, 128, 6), 200.0, False),
        ((3, 0, 4), 1.0, False),
        ((0, 5, 4), 1.0, False),
    ):
        a, b = make(m, k, scale=scale), make(*((n, k) if bias else (k, n)), scale=scale)
        pair = (a.abs(), b.abs()) if positive else (a, b)
        yield (*pair, make(n)) if bias else pair
    for value in (math.nan, math.inf):
        a, b = special(make(3, 70), value), make(*((5, 70) if bias else (70, 5)))
        yield (a, b, make(5)) if bias else (a, b)


def fp8_products(make: Make, granularity: str) -> Iterator[tuple[Tensor, ...]]:
    """fp8 operands and their scales."""
    for m, k, n in ((33, 300, 260), (5, 515, 130), (1, 7, 3), (2, 0, 3)):
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "tensor": ((), ()),
            "row": ((m, 1), (1, n)),
            "block": ((m, -(-k // 128)), (-(-k // 128), -(-n // 128))),
        }
        left, right = shapes[granularity]
        yield make(m, k), make(k, n), positive(left), positive(right)


def positive(shape: tuple[int, ...]) -> Tensor:
    """Float32 scales around one, of unequal size."""
    return torch.randn(shape).exp()


def int8_products() -> Iterator[tuple[Tensor, ...]]:
    """int8 operands and their scales."""
    for m, k, n in ((17, 300, 33), (1, 5, 3), (2, 0, 3)):
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((m, k), (k, n)))
        yield a, b, positive((m, 1)), positive((1, n))


def int4_products(make: Make, packing: str) -> Iterator[tuple[Tensor, ...]]:
    """x[M,K] and packed random codes, zero-points and scales."""
    for m, k, n, group in ((5, 128, 16, 32), (1, 16, 8, 16), (3, 64, 24, 8)):
        codes, zeros = torch.randint(0, 16, (k, n)), torch.randint(0, 16, (k // group, n))
        order = AWQ_ORDER if packing == "awq" else range(8)
        packed_zeros = pack(zeros.reshape(-1, n // 8, 8)[..., list(order)])
        if packing == "plain":
            qweight, packed_zeros = (codes[0::2] + 16 * codes[1::2]).to(torch.uint8), zeros.to(torch.uint8)
        elif packing == "awq":
            qweight = pack(codes.reshape(k, n // 8, 8)[..., list(order)])
        else:
            qweight = pack(codes.reshape(k // 8, 8, n).transpose(1, 2))
        yield make(m, k), qweight, make(k // group, n, scale=0.1), packed_zeros


def pack(nibbles: Tensor) -> Tensor:
    """Eight nibbles of the last dimension in one int32, the first lowest."""
    return (nibbles << 4 * torch.arange(8)).sum(-1).to(torch.int32)


def attentions(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """q, k, v; the second has queries that see nothing, the sixth scores far below zero."""
    sizes = ((2, 4, 2, 9, 70, 16, 8), (1, 2, 1, 20, 9, 8, 5), (1, 6, 2, 5, 130, 33, 33), (1, 1, 1, 3, 0, 8, 8))
    for (b, h, hkv, sq, sk, d, dv), scale in ((sizes[0], 1.0), *((s, 2.0) for s in sizes[1:]), (sizes[0], 12.0)):
        yield make(b, h, sq, d, scale=scale), make(b, hkv, sk, d, scale=scale), make(b, hkv, sk, dv) + 1
    yield make(1, 2, 6, 16).sign() + 150, make(1, 2, 70, 16).sign() - 150, make(1, 2, 70, 8)
    for value in (math.nan, math.inf):
        yield make(1, 2, 6, 16), make(1, 1, 6, 16), special(make(1, 1, 6, 8), value)
        yield special(make(1, 2, 6, 16), math.nan), make(1, 1, 6, 16), make(1, 1, 6, 8)
    yield make(1, 2, 6, 16), make(1, 1, 6, 16), make(1, 1, 6, 8, scale=3e4)


def decodes(make: Make, cache: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """Caches of which no slot is read behind the last token: NaN is there; the first also has an empty sequence."""
    for lengths, heads, groups, d, pages, page in (
        ((0, 9, 5, 12), 6, 2, 8, 14, 4),
        ((8,), 2, 1, 33, 5, 8),
        ((1, 64, 0, 0), 4, 4, 16, 9, 16),
        ((70, 3), 2, 2, 16, 90, 1),
    ):
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
    yield (
        make(1, 2, 8),
        *(x.to(cache) for x in (make(2, 4, 1, 8).float(), special(make(2, 4, 1, 8), math.nan).float())),
        torch.tensor([[1, 1]]).int(),
        torch.tensor([8]).int(),
    )
    yield (
        make(1, 2, 16).sign() + 30,
        *(x.to(cache) for x in (make(2, 64, 2, 16).float().sign() - 30, make(2, 64, 2, 16).float() * 1e4)),
        torch.tensor([[1, 0]]).int(),
        torch.tensor([128]).int(),
    )


def logits(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """Logits whose experts are all apart; the last have sigmoids that all underflow."""
    for tokens, experts, shift in ((9, 60, 0.0), (1, 4, 0.0), (0, 8, 0.0), (5, 8, -120.0)):
        apart = torch.stack([torch.randperm(experts) for _ in range(tokens)]) if tokens else torch.zeros(0, experts)
        step = 1.0 if shift else 0.125
        yield ((apart * step + 0.03 * torch.rand(tokens, experts) + shift).to(make(1).dtype),)


def mixtures(make: Make) -> Iterator[tuple[Tensor, ...]]:
    """Tokens with experts that repeat, and experts without tokens."""
    for tokens, d, f, experts, k in ((13, 24, 20, 5, 2), (2, 40, 130, 6, 2), (5, 8, 8, 2, 3), (0, 8, 8, 3, 2)):
        ids = torch.randint(0, experts, (tokens, k), dtype=torch.int32)
        ids[:1] = experts - 1
        yield make(tokens, d), make(experts, 2 * f, d), make(experts, d, f), torch.rand(tokens, k) + 0.1, ids


def inputs_of(spec: str, make: Make, options: dict[str, Any], cache: torch.dtype) -> Iterator[tuple[Tensor, ...]]:
    """The inputs that a spec is probed with."""
    makers: dict[str, Callable[[], Iterator[tuple[Tensor, ...]]]] = {
        "layernorm": lambda: norms(make, 2),
        "rmsnorm": lambda: norms(make, 1),
        "add_rmsnorm": lambda: norms(make, 1, residual=True),
        "swiglu": lambda: gated(make),
        "rope": lambda: rotations(make),
        "linear": lambda: products(make, bias=True),
        "gemm": lambda: products(make),
        "gemm_fp8": lambda: fp8_products(make, options.get("granularity", "tensor")),
        "gemm_int8": int8_products,
        "gemm_int4": lambda: int4_products(make, options.get("packing", "plain")),
        "attention": lambda: attentions(make),
        "attention_decode": lambda: decodes(make, cache),
        "moe_route": lambda: logits(make),
        "moe": lambda: mixtures(make),
    }
    if spec in MAKERS:
        return MAKERS[spec](make)
    makers |= probes_gradients.makers(make, options)
    return makers.get(spec, lambda: rows(make))()


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
        for number, inputs in enumerate(inputs_of(entry.spec, make, chosen, cache)):
            options = dict(chosen)
            if options.get("alibi"):
                options["slopes"] = torch.rand(inputs[0].shape[1]) + 0.1
            if "sinks" in options:
                options["sinks"] = torch.randn(inputs[0].shape[1]) if options["sinks"] else None
            yield Probe(inputs, options)
            if number in (0, 1):
                yield Probe(tuple(strided(x) for x in inputs), options)
