"""The gradients of the Triton mixture of experts, against autograd through the reference in float64."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.kernels.triton import moe as moe_module
from assay.kernels.triton import moe_backward as module
from assay.kernels.triton import moe_gemm
from assay.kernels.triton.moe_backward import moe_backward, moe_fp8_backward
from tests.kernels.test_triton_moe import Tensors, case, expanded, named, spread, transposed
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

KERNELS = (module._hidden_gradient_kernel, module._weight_gradient_kernel)
GROUPED = (module._hidden_gradient_kernel, moe_module._gate_up_kernel, moe_gemm._grouped_gemm_kernel)


def assert_right(tensors: Tensors, dy: Tensor | None = None) -> None:
    """Within what rounded activations and gradients of them leave, relative to the largest element."""
    x = tensors[0]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype) if dy is None else dy
    loose = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[x.dtype]
    found = moe_backward(*tensors, dy)
    assert [gradient.dtype for gradient in found] == [tensor.dtype for tensor in tensors[:4]]
    for own, right in zip(found, reference("moe_backward")(*tensors, dy), strict=True):
        largest = max(1.0, float(right.abs().max())) if right.numel() else 1.0
        torch.testing.assert_close(own.double(), right, rtol=0.0, atol=loose * largest)


@pytest.mark.parametrize(
    ("kernel", "config"), [(kernel, config) for kernel in KERNELS for config in kernel.configs], ids=named
)
@pytest.mark.parametrize("shape", [(9, 72, 136, 3, 2), (300, 13, 3, 2, 1)], ids=str)
def test_every_configuration(
    kernel: Any, config: triton.Config, shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever configuration tuning picks, with descriptors of the weights or without, the gradients are right."""
    monkeypatch.setattr(kernel, "configs", [config])
    monkeypatch.setattr(kernel, "early_config_prune", None)
    assert_right(case(*shape, torch.bfloat16))


@pytest.mark.parametrize("kernel", GROUPED, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_configuration_is_left(kernel: Any, dtype: torch.dtype) -> None:
    """At every height of blocks that there is, with descriptors and without; short blocks along K are float32's."""
    w = torch.zeros(1, 16, 16, dtype=dtype)
    tallest = module._MAX_BLOCK_M[w.element_size()] if kernel is module._hidden_gradient_kernel else 128
    for given in (w, TensorDescriptor.from_tensor(w, [1, 16, 16])) if w.element_size() == 2 else (w,):
        arguments = dict.fromkeys(kernel.arg_names, given) | {"SCALE_BLOCK": 0}
        for height in (16, 32, 64, tallest):
            left = kernel.early_config_prune(kernel.configs, arguments, BLOCK_M=height)
            assert left, height
            assert {config.kwargs["BLOCK_K"] == 16 for config in left} == {dtype == torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [1, 128])
def test_a_configuration_is_left_for_codes(dtype: torch.dtype, side: int) -> None:
    """At every height of blocks that experts in FP8 have, whether scales go with rows of them or with blocks."""
    kernel, x = module._hidden_gradient_kernel, torch.zeros(1, dtype=dtype)
    codes = torch.zeros(1, 16, 16, dtype=torch.float8_e4m3fn)
    for given in (codes, TensorDescriptor.from_tensor(codes, [1, 16, 16])):
        arguments = {"x_ptr": x, "w_up": given, "w_down": given, "SCALE_BLOCK": side}
        for height in (16, 32, 64):
            if height <= module._MAX_BLOCK_M_FP8[x.element_size()]:
                assert kernel.early_config_prune(kernel.configs, arguments, BLOCK_M=height), height


def fp8_case(shape: tuple[int, int, int, int, int], side: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens, codes, scales of blocks or of rows (side 1), routing and an upstream gradient."""
    x, w_gate_up, w_down, weights, ids = case(*shape, dtype)
    codes = [w.to(torch.float8_e4m3fn) for w in (w_gate_up, w_down)]
    random = torch.Generator().manual_seed(1)
    scales = []
    for w in codes:
        blocks = len(w), -(-w.shape[1] // side), -(-w.shape[2] // side) if side > 1 else 1
        scales.append(torch.rand(blocks, generator=random) + 0.5)
    return (x, *codes, *scales, weights, ids, torch.randn(x.shape, generator=random).to(dtype))


def turned_round(tensor: Tensor) -> Tensor:
    """The same numbers, the other way round of the last two dimensions."""
    return tensor.mT.contiguous().mT if tensor.dim() == 3 else tensor


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
def test_fp8_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype, granularity: str, side: int) -> None:
    """Scales by row and by blocks, which gate and up may share, of weights that lie along K or the other way."""
    tensors = fp8_case(shape, side, dtype)
    loose = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[dtype]
    right = reference("moe_fp8_backward")(*tensors, granularity=granularity)
    for given in (tensors, [turned_round(tensor) for tensor in tensors], [spread(tensor) for tensor in tensors]):
        found = moe_fp8_backward(*given, granularity=granularity)
        assert [gradient.dtype for gradient in found] == [dtype, torch.float32]
        for own, expected in zip(found, right, strict=True):
            torch.testing.assert_close(own.double(), expected, rtol=0.0, atol=loose * float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(0, 4, 3, 2, 2), (5, 0, 3, 2, 2), (5, 4, 0, 2, 2), (5, 4, 3, 0, 2), (5, 4, 3, 2, 0)])
def test_fp8_experts_of_nothing_have_gradients_of_zero(shape: tuple[int, int, int, int, int]) -> None:
    """As those of floats."""
    tensors = fp8_case(shape, 1, torch.bfloat16)
    for gradient, tensor in zip(moe_fp8_backward(*tensors), (tensors[0], tensors[5]), strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("view", [transposed, spread, expanded])
def test_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    """Transposed, sliced and expanded tensors are read where they lie."""
    x, w_gate_up, w_down, weights, ids = map(view, case(40, 9, 7, 6, 3))
    assert_right((x, w_gate_up, w_down, weights, ids), view(torch.randn(40, 9)))


def test_weights_that_lie_the_other_way() -> None:
    """Experts stored [E,D,2F] and [E,F,D] are copied by descriptors as well."""
    x, w_gate_up, w_down, weights, ids = case(40, 64, 72, 6, 3, torch.bfloat16)
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w_gate_up, w_down)]
    assert_right((x, turned[0], turned[1], weights, ids))


@pytest.mark.parametrize("chosen", [[0, 0, 0], [4, 2, 4], [-1, 5, 2]])
def test_some_experts_without_tokens(chosen: list[int]) -> None:
    """An expert without tokens has gradients of zero, one that comes twice in a token the sum, and an id of no expert
    adds nothing and has none for its weight."""
    tensors = (*case(70, 8, 6, 5, 3)[:4], torch.tensor([chosen], dtype=torch.int32).expand(70, 3))
    assert_right((tensors[0], tensors[1], tensors[2], tensors[3], tensors[4]))


@pytest.mark.parametrize("shape", [(0, 4, 3, 2, 2), (5, 0, 3, 2, 2), (5, 4, 0, 2, 2), (5, 4, 3, 0, 2), (5, 4, 3, 2, 0)])
def test_nothing_to_add_gives_zeros(shape: tuple[int, int, int, int, int]) -> None:
    """Without tokens, columns, an inner size, experts or choices every gradient is zero."""
    tensors = case(*shape)
    for gradient, tensor in zip(moe_backward(*tensors, tensors[0]), tensors, strict=False):
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
    """However often an expert comes: there are no atomics."""
    tensors = case(150, 40, 24, 2, 3, torch.bfloat16)
    dy = torch.randn(150, 40).to(torch.bfloat16)
    for first, second in zip(moe_backward(*tensors, dy), moe_backward(*tensors, dy), strict=True):
        assert torch.equal(first, second)
