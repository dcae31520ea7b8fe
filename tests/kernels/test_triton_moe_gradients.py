"""The gradients of the Triton mixture of experts, against autograd through the reference in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.kernels.triton import moe as moe_module
from assay.kernels.triton import moe_backward as module
from assay.kernels.triton import moe_gemm
from assay.kernels.triton.moe_backward import moe_backward, moe_fp8_backward
from tests.kernels.conftest import every_configuration
from tests.kernels.test_triton_moe import Shape, Tensors, case, expanded, n_contiguous, spread, transposed
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

GROUPED = (module._hidden_gradient_kernel, moe_module._gate_up_kernel, moe_gemm._grouped_gemm_kernel)


def assert_right(tensors: Tensors, dy: Tensor | None = None) -> None:
    """Within what rounded activations and gradients of them leave, relative to the largest element."""
    x = tensors[0]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) if dy is None else dy
    loose = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[x.dtype]
    gradients = moe_backward(*tensors, dy)
    assert [gradient.dtype for gradient in gradients] == [tensor.dtype for tensor in tensors[:4]]
    for gradient, right in zip(gradients, reference("moe_backward")(*tensors, dy), strict=True):
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(gradient.double(), right, rtol=0.0, atol=loose * largest)


@every_configuration(module._hidden_gradient_kernel, module._weight_gradient_kernel)
@pytest.mark.parametrize("shape", [(9, 72, 136, 3, 2), (300, 13, 3, 2, 1)], ids=str)
def test_every_configuration(configured: None, shape: Shape) -> None:
    """With weights loaded by TMA or by pointers."""
    assert_right(case(*shape, torch.bfloat16))


@pytest.mark.parametrize("kernel", GROUPED, ids=lambda kernel: kernel.base_fn.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_configuration_is_left(kernel: Any, dtype: torch.dtype) -> None:
    """At every BLOCK_M, with TMA and without; only float32 has a BLOCK_K of 16."""
    w = torch.zeros(1, 16, 16, dtype=dtype)
    max_block_m = module._MAX_BLOCK_M[w.element_size()] if kernel is module._hidden_gradient_kernel else 128
    for operand in (w, TensorDescriptor.from_tensor(w, [1, 16, 16])) if w.element_size() == 2 else (w,):
        arguments = dict.fromkeys(kernel.arg_names, operand) | {"SCALE_BLOCK": 0}
        for block_m in (16, 32, 64, max_block_m):
            left = kernel.early_config_prune(kernel.configs, arguments, BLOCK_M=block_m)
            assert left, block_m
            assert {config.kwargs["BLOCK_K"] == 16 for config in left} == {dtype == torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale_block", [1, 128])
def test_a_configuration_is_left_for_fp8(dtype: torch.dtype, scale_block: int) -> None:
    kernel, x = module._hidden_gradient_kernel, torch.zeros(1, dtype=dtype)
    codes = torch.zeros(1, 16, 16, dtype=torch.float8_e4m3fn)
    for w in (codes, TensorDescriptor.from_tensor(codes, [1, 16, 16])):
        arguments = {"x_ptr": x, "w_up": w, "w_down": w, "SCALE_BLOCK": scale_block}
        for block_m in (16, 32, 64):
            if block_m <= module._MAX_BLOCK_M_FP8[x.element_size()]:
                assert kernel.early_config_prune(kernel.configs, arguments, BLOCK_M=block_m), block_m


def fp8_case(shape: Shape, side: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors of `moe_fp8_backward` with scales of blocks, or of rows (side 1)."""
    x, w_gate_up, w_down, weights, ids = case(*shape, dtype)
    codes = [w.to(torch.float8_e4m3fn) for w in (w_gate_up, w_down)]
    random = torch.Generator().manual_seed(1)
    scales = []
    for w in codes:
        blocks = len(w), -(-w.shape[1] // side), -(-w.shape[2] // side) if side > 1 else 1
        scales.append(torch.rand(blocks, generator=random) + 0.5)
    return (x, *codes, *scales, weights, ids, torch.randn(x.shape, generator=random).to(dtype))


@pytest.mark.parametrize(("granularity", "side"), [("channel", 1), ("block", 128)])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *itertools.product([(40, 64, 128, 3, 2), (9, 16, 4, 3, 2)], [torch.float32, torch.bfloat16, torch.float16]),
        ((150, 272, 40, 4, 3), torch.bfloat16),
        *(
            pytest.param((150, 272, 40, 4, 3), dtype, marks=pytest.mark.evidence)
            for dtype in (torch.float32, torch.float16)
        ),
    ],
    ids=str,
)
def test_fp8_experts(shape: Shape, dtype: torch.dtype, granularity: str, side: int) -> None:
    """Scales of rows and of blocks, which gate and up may share, of K-contiguous and N-contiguous weights."""
    tensors = fp8_case(shape, side, dtype)
    loose = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    right = reference("moe_fp8_backward")(*tensors, granularity=granularity)
    for arguments in (tensors, [n_contiguous(x) if x.dim() == 3 else x for x in tensors], map(spread, tensors)):
        gradients = moe_fp8_backward(*arguments, granularity=granularity)
        assert [gradient.dtype for gradient in gradients] == [dtype, torch.float32]
        for gradient, expected in zip(gradients, right, strict=True):
            torch.testing.assert_close(gradient.double(), expected, rtol=0.0, atol=loose * float(expected.abs().max()))


@pytest.mark.parametrize("view", [transposed, spread, expanded])
def test_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    assert_right(tuple(map(view, case(40, 9, 7, 6, 3))), view(torch.randn(40, 9)))


def test_tma_loads_weights_that_are_not_k_contiguous() -> None:
    x, w_gate_up, w_down, weights, ids = case(40, 64, 72, 6, 3, torch.bfloat16)
    assert_right((x, n_contiguous(w_gate_up), n_contiguous(w_down), weights, ids))


@pytest.mark.parametrize("chosen", [[0, 0, 0], [4, 2, 4], [-1, 5, 2]])
def test_some_experts_without_tokens(chosen: list[int]) -> None:
    """An expert without tokens has gradients of zero, one that comes twice in a token the sum, and an id of no expert
    adds nothing and has none for its weight."""
    assert_right((*case(70, 8, 6, 5, 3)[:4], torch.tensor([chosen], dtype=torch.int32).expand(70, 3)))


@pytest.mark.parametrize("dimension", range(5))
def test_an_empty_dimension_gives_zeros(dimension: int) -> None:
    """No tokens, D, F, experts or choices."""
    shape = [0 if i == dimension else size for i, size in enumerate((5, 4, 3, 2, 2))]
    tensors = case(*shape)
    for gradient, tensor in zip(moe_backward(*tensors, tensors[0]), tensors, strict=False):
        assert torch.equal(gradient, torch.zeros_like(tensor))
    tensors = fp8_case(tuple(shape), 1, torch.bfloat16)
    for gradient, tensor in zip(moe_fp8_backward(*tensors), (tensors[0], tensors[5]), strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_token_stays_with_its_experts(bad: float) -> None:
    """NaN or an infinity in a token reaches its own gradient and those of its experts, and no others."""
    x, w_gate_up, w_down, weights, ids = case(40, 16, 24, 5, 2)
    ids %= 4
    ids[3] = 4
    x[3, 2] = bad
    dx, dw_gate_up, dw_down, dweights = moe_backward(x, w_gate_up, w_down, weights, ids, torch.ones_like(x))
    others = torch.arange(40) != 3
    for clean in (dx[others], dweights[others], dw_gate_up[:4], dw_down[:4]):
        assert clean.isfinite().all()
    for reached in (dx[3], dweights[3], dw_gate_up[4], dw_down[4]):
        assert not reached.isfinite().all()


def test_the_same_call_gives_the_same_bits() -> None:
    tensors = case(150, 40, 24, 2, 3, torch.bfloat16)
    dy = torch.randn(150, 40).to(torch.bfloat16)
    for first, second in zip(moe_backward(*tensors, dy), moe_backward(*tensors, dy), strict=True):
        assert torch.equal(first, second)
