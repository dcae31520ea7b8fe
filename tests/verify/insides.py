"""Matrix products with known insides, for fingerprints to be read from."""

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from assay.formats.format import Format, format_named
from assay.formats.rounding import Mode, round_to

Kernel = Callable[[Tensor, Tensor], Tensor]
Add = Callable[[Tensor, Tensor], Tensor]
Sum = Callable[[Tensor], Tensor]


def bits(precision: int) -> Format:
    """A format of float32's range with so many significant bits."""
    return Format(
        name=f"bits{precision}",
        kind="float",
        bits=8 + precision,
        precision=precision,
        bias=127,
        infinities=True,
        nan="ieee",
        source="made up",
    )


def in_float32(x: Tensor, y: Tensor) -> Tensor:
    """One addition of float32 numbers."""
    return x.float() + y.float()


def in_float16(x: Tensor, y: Tensor) -> Tensor:
    """One addition of float16 numbers."""
    return x.to(torch.float16) + y.to(torch.float16)


def cut_to(precision: int) -> Add:
    """One addition, its result cut to so many bits."""
    mask = -(1 << (53 - precision))

    def add(x: Tensor, y: Tensor) -> Tensor:
        return ((x.double() + y.double()).view(torch.int64) & mask).view(torch.float64)

    return add


def adder(format: str | Format, mode: Mode = "nearest") -> Add:
    """One addition, rounded to a format in a mode."""
    return lambda x, y: round_to(x + y, format, mode)


def in_sequence(add: Add, terms: Sequence[Tensor]) -> Tensor:
    """((t0 + t1) + t2) + ..."""
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


def sequential(products: Tensor, add: Add, step: int = 1) -> Tensor:
    """Products [K, M, N] one after another, backwards for a step of -1."""
    return in_sequence(add, list(products)[::step])


def pairwise(products: Tensor, add: Add) -> Tensor:
    """Halves, recursively."""
    if len(products) == 1:
        return products[0]
    half = len(products) // 2
    return add(pairwise(products[:half], add), pairwise(products[half:], add))


def blocked(products: Tensor, add: Add, block: int = 32, inner: Callable[[Tensor, Add], Tensor] = sequential) -> Tensor:
    """Blocks of terms, each summed by itself, one after another."""
    return in_sequence(add, [inner(part, add) for part in products.split(block)])


def split(products: Tensor, add: Add, parts: int = 4, shuffle: bool = False) -> Tensor:
    """Parts of equal length, added in the order in which they happen to be done."""
    done = [sequential(part, add) for part in products.split(-(-len(products) // parts))]
    if shuffle:
        random.shuffle(done)
    return in_sequence(add, done)


def lanes(products: Tensor, add: Add, count: int = 8) -> Tensor:
    """Accumulators for every count-th term, added pairwise at the end."""
    return pairwise(torch.stack([sequential(products[lane::count], add) for lane in range(count)]), add)


def promoted(products: Tensor, add: Add, every: int = 128) -> Tensor:
    """A narrow accumulator whose content moves into a float32 one every so many terms."""
    return in_sequence(in_float32, [sequential(part, add) for part in products.split(every)])


def aligned(products: Tensor, add: Add, step: int = 16, fraction: int = 13) -> Tensor:
    """A matrix unit: terms and running sum cut to fraction bits of the largest, added exactly, and cut again."""
    total = torch.zeros_like(products[0])
    for part in products.split(step):
        terms = torch.cat([total[None], part])
        exponent = torch.frexp(terms.abs().amax(0))[1] - 1
        gap = torch.ldexp(torch.ones_like(total), exponent - fraction)
        total = round_to((torch.trunc(terms / gap) * gap).sum(0), bits(fraction + 1), "toward_zero")
    return total


def gemm(
    order: Callable[..., Tensor] = sequential,
    add: Add | None = None,
    operand: Callable[[Tensor], Tensor] = lambda x: x,
    store: Callable[[Tensor, torch.dtype], Tensor] = lambda y, dtype: round_to(y, dtype).to(dtype),
    out: torch.dtype | None = None,
    **settings: object,
) -> Kernel:
    """a b with products that are exact, summed by `order` with additions `add`, and stored by `store`."""

    def kernel(a: Tensor, b: Tensor, *scales: Tensor) -> Tensor:
        products = operand(a.double()).T[:, :, None] * operand(b.double())[:, None, :]
        total = order(products if add else products.float(), add or in_float32, **settings)
        return store(total.double(), out or a.dtype)

    return kernel


def to_tf32(x: Tensor) -> Tensor:
    """Operands cut to 11 bits, as tensor cores read float32."""
    return round_to(x, format_named("tf32"), "toward_zero")


def storing(mode: Mode = "nearest", overflow: str = "inf") -> Callable[[Tensor, torch.dtype], Tensor]:
    """A store in a mode."""
    return lambda y, dtype: round_to(y, dtype, mode, overflow).to(dtype)  # type: ignore[arg-type]


def flushing(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A store that makes subnormal results zero."""
    stored = round_to(y, dtype).to(dtype)
    return torch.where(stored.abs() < torch.finfo(dtype).tiny, torch.zeros_like(stored), stored)


def flushed(x: Tensor) -> Tensor:
    """Operands of float32's or bfloat16's range with subnormal ones read as zero."""
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x)


def batch_dependent(a: Tensor, b: Tensor) -> Tensor:
    """With eight rows or more the sum is cut in two."""
    return gemm(split, parts=2)(a, b) if len(a) >= 8 else gemm()(a, b)


def drops_nan(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A clamp by fmax, which prefers numbers to NaN."""
    limit = torch.full_like(y, -torch.finfo(dtype).max)
    return round_to(torch.fmax(y, limit), dtype).to(dtype)


split_in_any_order = partial(gemm, split, shuffle=True)
