"""Differentiable functions to examine: honest ones, and ones with one fault each in a pass."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.golden import evaluate


class RmsNorm(torch.autograd.Function):
    """RMS norm with its gradient by hand; a subclass overrides what it does wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        values = x.float()
        root = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        return (values * root * weight.float()).to(x.dtype)

    @classmethod
    def parts(cls, ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dx, the rows of dweight, and x, in float32."""
        x, weight = (saved.float() for saved in ctx.saved_tensors)
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        normalized, grown = x * root, dy.float() * weight
        dx = (grown - normalized * (grown * normalized).mean(-1, keepdim=True)) * root
        return dx, dy.float() * normalized, x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows, _ = RmsNorm.parts(ctx, dy)
        return dx.to(dy.dtype), rows.sum(0).to(dy.dtype), None


class NoGradientOfWeight(RmsNorm):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return RmsNorm.parts(ctx, dy)[0].to(dy.dtype), None, None


class WrongFactor(RmsNorm):
    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows, _ = RmsNorm.parts(ctx, dy)
        return dx.to(dy.dtype) * 1.01, rows.sum(0).to(dy.dtype), None


class WeightNotSummed(RmsNorm):
    """Of dweight, only the first row arrives."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows, _ = RmsNorm.parts(ctx, dy)
        return dx.to(dy.dtype), (rows[0] if len(rows) else rows.sum(0)).to(dy.dtype), None


class WeightSummedNarrowly(RmsNorm):
    """dweight is summed in the input's dtype, row by row (Liger-Kernel#950)."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows, _ = RmsNorm.parts(ctx, dy)
        total = torch.zeros_like(rows[0] if len(rows) else rows.sum(0)).to(dy.dtype)
        for row in rows:
            total = total + row.to(dy.dtype)
        return dx.to(dy.dtype), total, None


class OverwritesInput(RmsNorm):
    """dx is written over the x that was saved (Liger-Kernel#1251)."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, rows, _ = RmsNorm.parts(ctx, dy)
        saved = ctx.saved_tensors[0].detach()
        with torch.no_grad():
            saved.copy_(dx.to(dy.dtype))
        return saved, rows.sum(0).to(dy.dtype), None


class StridesIgnored(RmsNorm):
    """dy's memory is taken for dense rows (flash-attention#2541)."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dense = torch.as_strided(dy, dy.shape, (dy.shape[1], 1))
        dx, rows, _ = RmsNorm.parts(ctx, dense)
        return dx.to(dy.dtype), rows.sum(0).to(dy.dtype), None


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
