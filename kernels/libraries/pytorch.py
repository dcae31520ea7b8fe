"""PyTorch's kernels with the signatures of the specs, for `assay survey`.

Each function takes a spec's tensors in order and its options as keywords, and calls one PyTorch kernel. Where the
kernel can't take an argument (its strides, a head size), the function converts it and says so, but computes nothing
that the kernel should. A PyTorch function that has the spec's signature (`torch.mm`, `torch.nn.functional.gelu`) needs
no adapter: `configs/survey.toml` names it.
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
    """A batch of one: PyTorch has another kernel for small batched products."""
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def mv(a: Tensor, b: Tensor) -> Tensor:
    """The matrix-vector kernel; `b` has one column."""
    return torch.mv(a, b.squeeze(1)).unsqueeze(1)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor") -> Tensor:
    """The kernel infers `granularity` from the scales' shapes; it needs `b` column-major and row scales contiguous."""
    return torch._scaled_mm(a, _column_major(b), _packed(scale_a), _packed(scale_b), out_dtype=torch.bfloat16)


def functional_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, granularity: str = "tensor"
) -> Tensor:
    """The public function, which takes the granularity."""
    recipe = F.ScalingType.TensorWise if granularity == "tensor" else F.ScalingType.RowWise
    return F.scaled_mm(
        a, _column_major(b), _packed(scale_a), recipe, _packed(scale_b), recipe, output_dtype=torch.bfloat16
    )


def _column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def _packed(x: Tensor) -> Tensor:
    """Copy, with standard strides for dimensions of size one too, which `contiguous` keeps and the kernel checks."""
    return x.clone(memory_format=torch.contiguous_format)
