"""What a kernel may do inside a call, and signs that it may not lose."""

import torch
from torch import Tensor

from assay.verify import Contract

from .examined import quick


def test_a_kernel_may_use_autograd_inside() -> None:
    """Gradients by torch's autograd, results that still hang on their graph: judged by their numbers."""

    def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        leaves = gate.detach().float().requires_grad_(), up.detach().float().requires_grad_()
        y = torch.nn.functional.silu(leaves[0]) * leaves[1]
        return tuple(g.to(gate.dtype) for g in torch.autograd.grad(y, leaves, dy.float(), create_graph=True))

    contract = Contract(nonfinite="unspecified")  # autograd's formula has no limit at infinity
    assert quick(swiglu_backward, "swiglu_backward", "bfloat16", contract=contract, examples=10).passed


def test_the_sign_of_a_zero_counts_where_it_decides() -> None:
    """1/x of -0.0 is -inf: a kernel that gives +inf there fails, and nowhere else does it differ."""

    def unsigned_at_zero(x: Tensor) -> Tensor:
        return torch.reciprocal(x.float() + 0.0).to(x.dtype)

    assert quick(lambda x: torch.reciprocal(x), "reciprocal", examples=10).passed
    verdict = quick(unsigned_at_zero, "reciprocal", examples=10)
    assert verdict.failure is not None
    assert verdict.failure.kind == "nonfinite"
    assert verdict.failure.got == float("inf")
    assert verdict.failure.golden == float("-inf")
