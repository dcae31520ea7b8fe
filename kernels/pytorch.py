"""PyTorch's kernels under the specs' signatures, as `assay survey` calls them.

Each function takes a spec's tensors in the order of the spec's table and that spec's options as keywords, and calls one
PyTorch kernel. What a kernel can't take as it comes (a stride, a head size) is mended here and said so; nothing is
computed here that the kernel should compute. A PyTorch function that already has the spec's signature (`torch.mm`,
`torch.nn.functional.gelu`) needs no line here: `configs/survey.toml` names it directly.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, dim=-1)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


def softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    dx: Tensor = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    return dx


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_backward(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, ...]:
    bias = torch.zeros_like(weight)
    return _gradients(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, eps), (x, weight, bias), dy)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_backward(x: Tensor, weight: Tensor, dy: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, ...]:
    return _gradients(lambda x, weight: F.rms_norm(x, weight.shape, weight, eps), (x, weight), dy)


def sum_rows(shards: Tensor) -> Tensor:
    """A reduction over shards, as one process that holds them all does it."""
    return torch.sum(shards, dim=0)


def cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    return F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )


def cross_entropy_backward(
    logits: Tensor, target: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """The upstream gradient is one."""

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(
            logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
        )

    return _gradients(loss, (logits,))[0]


def addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight.t())


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """A batch of one: small products take a kernel of their own there."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def mv(a: Tensor, b: Tensor) -> Tensor:
    """The matrix-vector kernel; `b` has one column."""
    return torch.mv(a, b.squeeze(1)).unsqueeze(1)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """`granularity` is read off the scales' shapes. The kernel wants `b` column-major and row scales contiguous."""
    return torch._scaled_mm(a, _column_major(b), _packed(scale_a), _packed(scale_b), out_dtype=torch.bfloat16)


def functional_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """The public twin of `scaled_mm`, which is told the granularity."""
    recipe = F.ScalingType.TensorWise if granularity == "tensor" else F.ScalingType.RowWise
    return F.scaled_mm(
        a, _column_major(b), _packed(scale_a), recipe, _packed(scale_b), recipe, output_dtype=torch.bfloat16
    )


def _gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The gradients of `function` by each of `inputs`, as autograd forms them; `upstream` is one where left out."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        return torch.autograd.grad(out, leaves, torch.ones_like(out) if upstream is None else upstream)


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _packed(x: Tensor) -> Tensor:
    """A copy with a new tensor's strides: `contiguous` would leave those of dimensions of one, which are checked."""
    return x.clone(memory_format=torch.contiguous_format)
