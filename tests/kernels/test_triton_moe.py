"""The Triton mixture of experts against torch in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import moe as moe_module
from assay.kernels.triton import moe_gemm
from assay.kernels.triton.moe import moe, moe_fp8, moe_int4
from tests.kernels.conftest import every_configuration
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

Tensors = tuple[Tensor, ...]
Shape = tuple[int, ...]  # T, D, F, E, k


def case(tokens: int, d: int, f: int, experts: int, choices: int, dtype: torch.dtype = torch.float32) -> Tensors:
    random = torch.Generator().manual_seed(0)
    return (
        torch.randn(tokens, d, generator=random).to(dtype),
        (torch.randn(experts, 2 * f, d, generator=random) / max(d, 1) ** 0.5).to(dtype),
        (torch.randn(experts, d, f, generator=random) / max(f, 1) ** 0.5).to(dtype),
        torch.rand(tokens, choices, generator=random),
        torch.randint(0, max(experts, 1), (tokens, choices), generator=random).to(torch.int32),
    )


def n_contiguous(w: Tensor) -> Tensor:
    """The same weights [E,N,K], contiguous along N."""
    return w.mT.contiguous().mT


def assert_right(tensors: Tensors, rtol: float = 1e-5) -> None:
    y = moe(*tensors)
    assert y.dtype == tensors[0].dtype
    torch.testing.assert_close(y.double(), reference("moe")(*tensors)[0], rtol=rtol, atol=rtol)


@every_configuration(moe_module._gate_up_kernel, moe_gemm._grouped_gemm_kernel)
@pytest.mark.parametrize("shape", [(7, 72, 128, 3, 2), (300, 13, 3, 2, 1)], ids=str)
def test_every_configuration(configured: None, shape: Shape) -> None:
    """With blocks of few rows and of many, and weights loaded by TMA or by pointers."""
    assert_right(case(*shape, torch.bfloat16), rtol=2e-2)


@pytest.mark.parametrize("shape", [(40, 64, 128, 3, 2), (150, 272, 40, 4, 3), (9, 16, 4, 3, 2)], ids=str)
def test_fp8_experts(shape: Shape) -> None:
    """Scales of rows and of blocks, which gate and up may share, of K-contiguous and N-contiguous weights."""
    x, w_gate_up, w_down, weights, ids = case(*shape, torch.bfloat16)
    codes = w_gate_up.to(torch.float8_e4m3fn), w_down.to(torch.float8_e4m3fn)
    for granularity, side in (("channel", 1), ("block", 128)):
        scales = [
            torch.rand(len(w), -(-w.shape[1] // side), -(-w.shape[2] // side) if side > 1 else 1) + 0.5 for w in codes
        ]
        right = reference("moe_fp8")(x, *codes, *scales, weights, ids, granularity=granularity)[0]
        for w in (codes, map(n_contiguous, codes)):
            y = moe_fp8(x, *w, *scales, weights, ids, granularity=granularity)
            torch.testing.assert_close(y.double(), right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))


def packed_experts(shape: Shape, group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    x, w_gate_up, w_down, weights, ids = case(*shape, dtype)
    sizes = [w.shape for w in (w_gate_up, w_down)]
    codes = [torch.randint(256, (e, n, k // 2)).byte() for e, n, k in sizes]
    scales = [((torch.rand(e, n, k // group) + 0.5) / (8 * max(k, 1) ** 0.5)).to(dtype) for e, n, k in sizes]
    zeros = [torch.randint(16, (e, n, k // group)).byte() for e, n, k in sizes]
    return (x, *codes, *scales, *zeros, weights, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "group"), [((40, 64, 128, 3, 2), 32), ((40, 144, 96, 3, 2), 48), ((9, 16, 8, 3, 2), 4)], ids=str
)
def test_int4_experts(shape: Shape, group: int, dtype: torch.dtype) -> None:
    """Groups longer and shorter than a tile, of a power of two and not, of K-contiguous and N-contiguous codes."""
    x, *tensors = packed_experts(shape, group, dtype)
    right = reference("moe_int4")(x, *tensors)[0]
    share = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for w in (tensors[:6], map(n_contiguous, tensors[:6])):
        y = moe_int4(x, *w, *tensors[6:])
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), right, rtol=share, atol=share * float(right.abs().max()))


def test_int4_groups_must_divide_a_row_of_whole_bytes() -> None:
    tensors = list(packed_experts((5, 12, 8, 2, 2), 4, torch.float32))
    for place, name, wanted in ((3, "scale_gate_up", 12), (4, "scale_down", 8)):
        wrong = [torch.cat([x, x, x], 2)[:, :, :5] if at in (place, place + 2) else x for at, x in enumerate(tensors)]
        with pytest.raises(ValueError, match=f"^{name}: expected a number of groups that divides {wanted}, got 5$"):
            moe_int4(*wrong)
    odd = [x[:, :11] if at in (0, 2, 4, 6) else x for at, x in enumerate(tensors)]
    with pytest.raises(ValueError, match=r"^x: expected D to be even, got D=11$"):
        moe_int4(*odd)


def test_an_up_half_that_tma_cannot_start_at() -> None:
    """Weights stored [E,D,2F] whose up half is not aligned to 16 bytes are loaded by pointers."""
    x, w_gate_up, w_down, weights, ids = case(9, 16, 4, 3, 2, torch.bfloat16)
    assert_right((x, n_contiguous(w_gate_up), w_down, weights, ids), rtol=2e-2)


def transposed(tensor: Tensor) -> Tensor:
    """The first dimension is contiguous."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def spread(tensor: Tensor) -> Tensor:
    """Every second element of a larger tensor in every dimension, with NaN or -1 between them."""
    larger = torch.full([2 * size + 1 for size in tensor.shape], float("nan") if tensor.is_floating_point() else -1)
    larger = larger.to(tensor.dtype)
    view = larger[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("view", [transposed, spread, expanded])
def test_any_strides(view: Callable[[Tensor], Tensor]) -> None:
    """Of each tensor, and of all together."""
    tensors = case(40, 9, 7, 6, 3)
    for position in range(5):
        assert_right(tuple(view(x) if i == position else x for i, x in enumerate(tensors)))
    assert_right(tuple(map(view, tensors)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_dtypes(dtype: torch.dtype) -> None:
    assert_right(case(40, 33, 65, 5, 2, dtype), rtol=2e-2)


@pytest.mark.parametrize("chosen", [[0, 0, 0], [4, 4, 4], [4, 2, 4], [2, 2, 0]])
def test_some_experts_without_tokens(chosen: list[int]) -> None:
    """All tokens may go to one expert, an expert may come twice in a token, and others may have no token."""
    tensors = case(70, 8, 6, 5, 3)
    assert_right((*tensors[:4], torch.tensor([chosen], dtype=torch.int32).expand(70, 3)))


def test_other_ids_add_nothing() -> None:
    """An id below zero or beyond the last expert contributes nothing, and no unwritten memory is read for it."""
    x, w_gate_up, w_down, weights, _ = case(3, 8, 6, 5, 2)
    ids = torch.tensor([[-1, 2], [5, 2**31 - 1], [-(2**31), 4]], dtype=torch.int32)
    assert_right((x, w_gate_up, w_down, weights, ids))
    assert (moe(x, w_gate_up, w_down, weights, ids)[1] == 0).all()


@pytest.mark.parametrize("dimension", range(5))
def test_an_empty_dimension_gives_zeros(dimension: int) -> None:
    """No tokens, D, F, experts or choices."""
    shape = [0 if i == dimension else size for i, size in enumerate((5, 4, 4, 2, 2))]
    for kernel, tensors in ((moe, case(*shape)), (moe_int4, packed_experts(tuple(shape), 2, torch.bfloat16))):
        assert torch.equal(kernel(*tensors), torch.zeros_like(tensors[0]))


def test_a_nan_stays_with_its_token() -> None:
    """NaN in a token or an expert reaches the tokens concerned, and no other row of their blocks."""
    x, w_gate_up, w_down, weights, ids = case(40, 8, 6, 5, 2)
    x[3, 2] = w_down[1, 4, 2] = float("nan")
    concerned = (torch.arange(40) == 3) | (ids == 1).any(1)
    y = moe(x, w_gate_up, w_down, weights, ids)
    assert torch.equal(y.isnan().any(1), concerned)
    assert y[3].isnan().all()
    assert not y[torch.arange(40) != 3][:, [0, 1, 2, 3, 5, 6, 7]].isnan().any()


def test_a_closed_gate_is_zero() -> None:
    """silu(-inf) is zero."""
    x, w_down = torch.ones(1, 1), torch.ones(1, 1, 1)
    w_gate_up = torch.tensor([[[-float("inf")], [3.0]]])
    y = moe(x, w_gate_up, w_down, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    assert y.tolist() == [[0.0]]
