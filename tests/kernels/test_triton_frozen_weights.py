"""Gradients of the bundled Triton kernels where weights are frozen: nothing is computed for them."""

import importlib
from typing import Any

import pytest
import torch

from tests.kernels.test_triton_gradients import KERNELS, Differentiable, gradients

pytestmark = pytest.mark.usefixtures("interpreted")

WORK = {
    "gemm": ("gemm", "matmul", 2, 1),
    "rmsnorm": ("norm_backward", "sum_partials", 1, 0),
    "add_rmsnorm": ("norm_backward", "sum_partials", 1, 0),
    "layernorm": ("norm_backward", "sum_partials", 2, 0),
    "causal_conv1d": ("causal_conv1d", "sum_partials", 2, 0),
    "linear_cross_entropy": ("linear_cross_entropy", "matmul_into", 2, 1),
    "moe": ("moe_backward", "write_weight_gradient", 2, 0),
}
"""By kernel: what is called for weights, of which module, and how often in a backward pass: for all, for x alone."""
WITH_WEIGHTS = [kernel for kernel in KERNELS if kernel.kernel.__name__ in WORK]


def counted(kernel: Differentiable, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, int]:
    """The gradient of the first tensor, and how often the work was called."""
    module, name, *_ = WORK[kernel.kernel.__name__]
    place = importlib.import_module(f"assay.kernels.triton.{module}")
    work, calls = getattr(place, name), [0]

    def call(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return work(*args, **options)

    first, *others = kernel.leaves()
    leaves = [first, *(other.detach() if frozen else other for other in others)]
    with monkeypatch.context() as patch:
        patch.setattr(place, name, call)
        kernel.call(*leaves)
        forward, calls[0] = calls[0], 0
        found = gradients(kernel.call, leaves)
    assert len(found) == sum(leaf.requires_grad for leaf in leaves)
    return found[0], calls[0] - forward


@pytest.mark.parametrize("kernel", WITH_WEIGHTS, ids=str)
def test_frozen_weights_cost_nothing(kernel: Differentiable, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x has the same bits whether or not the weights' are asked for, which are else not computed."""
    *_, often, seldom = WORK[kernel.kernel.__name__]
    expected, whole = counted(kernel, False, monkeypatch)
    found, calls = counted(kernel, True, monkeypatch)
    assert torch.equal(found, expected)
    assert (whole, calls) == (often, seldom)


@pytest.mark.parametrize("kernel", WITH_WEIGHTS, ids=str)
def test_a_gradient_alone_has_the_same_bits(kernel: Differentiable) -> None:
    """Each tensor's, with all others frozen: and compiled code has it, too."""
    expected = gradients(kernel.call, kernel.leaves())
    for place in range(len(expected)):
        leaves = kernel.leaves()
        for other in (leaf for leaf in leaves[:place] + leaves[place + 1 :] if leaf.requires_grad):
            other.requires_grad_(False)
        torch.compiler.reset()
        compiled = torch.compile(kernel.call, backend="aot_eager", fullgraph=True)
        for call in (kernel.call, compiled):
            (found,) = gradients(call, leaves)
            assert torch.equal(found, expected[place])
