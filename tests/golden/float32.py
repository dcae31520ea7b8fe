"""Parts of honest float32 kernels: sums in many orders, and elementary functions as bad as a contract lets them be."""

import math
from collections.abc import Callable

import torch

Tensor = torch.Tensor
Sum = Callable[[Tensor], Tensor]
Function = Callable[[Tensor], Tensor]

LOG2E, LN2 = (torch.tensor(value, dtype=torch.float32) for value in (math.log2(math.e), math.log(2)))


def single(values: Tensor) -> Tensor:
    """float64 to float32, rounded once."""
    return values.to(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c, rounded once (but for float64's own rounding)."""
    return single(a.double() * b.double() + c.double())


def forward(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[..., 0]) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    for place in range(x.shape[-1]):
        total = total + x[..., place]
    return total


def backward(x: Tensor) -> Tensor:
    return forward(x.flip(-1))


def pairwise(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        x = torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
        x = x[..., 0::2] + x[..., 1::2]
    return x.sum(-1)


def chunked(size: int) -> Sum:
    """Forward within chunks, forward over chunks."""
    return lambda x: (
        forward(torch.stack([forward(part) for part in x.split(size, -1)], -1)) if x.shape[-1] else x.sum(-1)
    )


def lanes(count: int) -> Sum:
    """Every lane its own running sum, a tree at the end."""

    def sum_lanes(x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % count))
        return pairwise(forward(padded.reshape(*x.shape[:-1], -1, count).transpose(-1, -2)))

    return sum_lanes


def kahan(x: Tensor) -> Tensor:
    total, lost = torch.zeros_like(x.sum(-1)), torch.zeros_like(x.sum(-1))
    for place in range(x.shape[-1]):
        term = x[..., place] - lost
        grown = total + term
        total, lost = grown, (grown - total) - term
    return total


SUMS: dict[str, Sum] = {
    "forward": forward,
    "backward": backward,
    "pairwise": pairwise,
    "chunks of 16": chunked(16),
    "32 lanes": lanes(32),
    "Kahan": kahan,
    "torch": lambda x: x.sum(-1),
}


def within(function: Function, ulps: float, sign: float) -> Function:
    """The float32 function whose results are the farthest off, upwards or downwards, that ``ulps`` allow.

    sign 0: correctly rounded.
    """

    def evaluate(x: Tensor) -> Tensor:
        exact = function(x.double())
        if sign == 0:
            return single(exact)
        spacing = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126, max=2.0**127))) - 23)
        moved = exact + sign * ulps * spacing
        rounded = single(moved)
        beyond = (rounded.double() - exact).abs() > ulps * spacing
        rounded = torch.where(beyond, torch.nextafter(rounded, single(exact)), rounded)
        stays = (exact == single(exact).double()) | ~torch.isfinite(exact)  # exp(0) is one, x / 1 is x
        return torch.where(stays, single(exact), rounded)

    return evaluate


class Functions:
    """Elementary functions in float32, off by as much as the default contract allows, all to one side."""

    def __init__(self, sign: float) -> None:
        self.exp, self.exp2 = within(torch.exp, 2, sign), within(torch.exp2, 2, sign)
        self.log, self.log2 = within(torch.log, 2, sign), within(torch.log2, 2, sign)
        self.rsqrt = within(lambda x: 1 / torch.sqrt(x), 2, -sign)
        self.reciprocal = within(lambda x: 1 / x, 2, -sign)
        self.sigmoid, self.tanh, self.erf = (within(f, 4, sign) for f in (torch.sigmoid, torch.tanh, torch.erf))
        self.sign = sign

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return within(lambda x: x / b.double(), 2, -self.sign)(a)


EXPONENTIALS: dict[str, Callable[[Functions, Tensor, Tensor], Tensor]] = {
    "exp(x - m)": lambda f, x, m: f.exp(x - m),
    "exp2((x - m) c)": lambda f, x, m: f.exp2((x - m) * LOG2E),
    "exp2(x c - m c)": lambda f, x, m: f.exp2(x * LOG2E - m * LOG2E),
    "exp2(fma(x, c, -m c))": lambda f, x, m: f.exp2(fma(x, LOG2E, -(m * LOG2E))),
}
"""exp(x - m) as kernels write it."""
