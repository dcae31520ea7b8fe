"""Grouped products: x [..., G * K] with a weight [N, K], whose rows are split among G groups of K columns of x.

G is the number of columns of x over that of the weight; a product of one group is a linear.
"""

import torch
from torch import Tensor


def count(x: Tensor, weight: Tensor) -> int:
    """Return the number of groups of x [..., G * K] for a weight [N, K]."""
    return x.shape[-1] // max(weight.shape[-1], 1) or 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product [..., N] of x [..., G * K] and a weight [N, K], with a bias [N] added."""
    groups = count(x, weight)
    if groups == 1:
        return torch.nn.functional.linear(x, weight, bias)
    out = torch.einsum(
        "...gk,gnk->...gn", torch.unflatten(x, -1, (groups, -1)), torch.unflatten(weight, 0, (groups, -1))
    )
    return out.flatten(-2) if bias is None else out.flatten(-2) + bias


def input_gradient(g: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Return the cotangents [..., G * K] of x from those g [..., N] of its product with a weight [N, K]."""
    if groups == 1:
        return g @ weight
    operands = torch.unflatten(g, -1, (groups, -1)), torch.unflatten(weight, 0, (groups, -1))
    return torch.einsum("...gn,gnk->...gk", *operands).flatten(-2)


def weight_gradient(g: Tensor, x: Tensor, groups: int) -> Tensor:
    """Return g' x of every group, the gradient [..., N, K] of a weight, from g [..., T, N] and x [..., T, G * K]."""
    if groups == 1:
        return g.mT @ x
    operands = torch.unflatten(g, -1, (groups, -1)), torch.unflatten(x, -1, (groups, -1))
    return torch.einsum("...tgn,...tgk->...gnk", *operands).flatten(-3, -2)


def slice_rows(x: Tensor, g: Tensor, groups: int, start: int, stop: int) -> tuple[Tensor, Tensor, int, slice]:
    """Return what rows ``start`` to ``stop`` of a weight need: the groups of x [..., G * K] and of g [..., N] with
    these rows, the number of groups, and the slice of the rows within them; of one group no more than these rows."""
    rows, columns = g.shape[-1] // groups, x.shape[-1] // groups
    first, last = start // rows, -(-stop // rows)
    x = x[..., first * columns : last * columns]
    if last - first <= 1:
        return x, g[..., start:stop], 1, slice(None)
    return x, g[..., first * rows : last * rows], last - first, slice(start - first * rows, stop - first * rows)


def mean(values: Tensor, columns: int) -> Tensor:
    """Return the means over the groups of values [..., G * K], [..., K] of ``columns``."""
    return values if values.shape[-1] == columns else torch.unflatten(values, -1, (-1, columns)).mean(-2)
