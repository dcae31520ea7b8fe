"""Differentiable functions to examine: honest ones, and ones with one fault each in a pass."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.golden import evaluate


class RmsNorm(torch.autograd.Function):
    """RMS norm with its gradient by hand; `with_gradients` overrides what a faulty one does wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        values = x.float()
        root = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return (values * root * weight.float()).to(x.dtype)

    @staticmethod
    def parts(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dx in the dtype of dy, and the rows of dweight in float32."""
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        normalized, grown = x * root, dy.float() * weight
        dx = (grown - normalized * (grown * normalized).mean(-1, keepdim=True)) * root
        return dx.to(dy.dtype), dy.float() * normalized

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows = RmsNorm.parts(ctx, dy)
        return dx, rows.sum(0).to(dy.dtype), None


def with_gradients(gradients: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]) -> Any:
    """`RmsNorm` whose backward pass makes dx and dweight of what was saved, dx, and the rows of dweight."""

    class Faulty(RmsNorm):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            dx, dweight = gradients(ctx, *RmsNorm.parts(ctx, dy))
            return dx, None if dweight is None else dweight.to(dy.dtype), None

    return Faulty


def summed_narrowly(ctx: Any, dx: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """dweight is summed in the input's dtype, row by row (Liger-Kernel#950)."""
    total = torch.zeros(rows.shape[1], dtype=dx.dtype)
    for row in rows:
        total = total + row.to(dx.dtype)
    return dx, total


def over_the_input(ctx: Any, dx: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """dx is written over the x that was saved (Liger-Kernel#1251)."""
    saved = ctx.saved_tensors[0].detach()
    with torch.no_grad():
        saved.copy_(dx)
    return saved, rows.sum(0)


NoGradientOfWeight = with_gradients(lambda ctx, dx, rows: (dx, None))
WrongFactor = with_gradients(lambda ctx, dx, rows: (dx * 1.01, rows.sum(0)))
# Of dweight, only the first row arrives.
WeightNotSummed = with_gradients(lambda ctx, dx, rows: (dx, rows[0] if len(rows) else rows.sum(0)))
WeightSummedNarrowly, OverwritesInput = with_gradients(summed_narrowly), with_gradients(over_the_input)


class StridesIgnored(RmsNorm):
    """dy's memory is taken for dense rows (flash-attention#2541)."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return RmsNorm.backward(ctx, torch.as_strided(dy, dy.shape, (dy.shape[1], 1)))


class WrongForward(RmsNorm):
    """The weight is added, in the forward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return RmsNorm.forward(ctx, x, weight, eps) + weight


class CrossEntropy(torch.autograd.Function):
    """The upstream gradient is taken for one number (Liger-Kernel#680)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        ctx.save_for_backward(logits, target)
        ctx.reduction = reduction
        return F.cross_entropy(logits, target, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        logits, target = ctx.saved_tensors
        given = evaluate("cross_entropy_backward", logits, target, reduction=ctx.reduction).value
        return given.to(logits.dtype) * dloss.reshape(-1)[:1].sum(), None, None


class Softmax(torch.autograd.Function):
    """The backward pass starts from y as it was returned, and changes it where the subclass says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        y = ctx.saved_tensors[0].float()
        return (y * (dy.float() - (y * dy.float()).sum(-1, keepdim=True))).to(dy.dtype)


class SoftmaxOverwritesResult(Softmax):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        dx = Softmax.backward(ctx, dy)
        y.detach().copy_(dx)
        return dx


class SoftmaxWithoutSum(Softmax):
    """The sum over the row is left out."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.saved_tensors[0] * dy


def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.float(), target, **options)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (part.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.shape[3] ** -0.5
    return (torch.softmax(scores, -1) @ v).to(q.dtype)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias, **options)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Torch's silu makes NaN of -inf."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)
