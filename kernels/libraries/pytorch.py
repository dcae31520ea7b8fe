"""PyTorch's kernels under the specs' signatures, as `assay survey` calls them.

Each function takes a spec's tensors in the order of the spec's table and that spec's options as keywords, and calls one
PyTorch kernel. What a kernel can't take as it comes (a stride, a head size) is mended here and said so; nothing is
computed here that the kernel should compute. A PyTorch function that already has the spec's signature (`torch.mm`,
`torch.nn.functional.gelu`) needs no line here: `configs/survey.toml` names it directly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def log_softmax(x: Tensor) -> Tensor:
    return F.log_softmax(x, dim=-1)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


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


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _packed(x: Tensor) -> Tensor:
    """A copy with a new tensor's strides: `contiguous` would leave those of dimensions of one, which are checked."""
    return x.clone(memory_format=torch.contiguous_format)
