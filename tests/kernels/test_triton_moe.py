"""The Triton mixture of experts: arguments, registration, and a few cases against torch in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from assay.kernels.triton import moe as moe_module
from assay.kernels.triton import moe_gemm
from assay.kernels.triton.moe import moe, moe_fp8, moe_int4
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(tokens: int, d: int, f: int, experts: int, choices: int, dtype: torch.dtype = torch.float32) -> Tensors:
    random = torch.Generator().manual_seed(0)
    return (
        torch.randn(tokens, d, generator=random).to(dtype),
        (torch.randn(experts, 2 * f, d, generator=random) / max(d, 1) ** 0.5).to(dtype),
        (torch.randn(experts, d, f, generator=random) / max(f, 1) ** 0.5).to(dtype),
        torch.rand(tokens, choices, generator=random),
        torch.randint(0, max(experts, 1), (tokens, choices), generator=random).to(torch.int32),
    )


def assert_right(tensors: Tensors, rtol: float = 1e-5) -> None:
    y = moe(*tensors)
    assert y.dtype == tensors[0].dtype
    torch.testing.assert_close(y.double(), reference("moe")(*tensors)[0], rtol=rtol, atol=rtol)


KERNELS = (moe_module._gate_up_kernel, moe_gemm._grouped_gemm_kernel)
TUNING = [(kernel, config) for kernel in KERNELS for config in kernel.configs]


def named(value: Any) -> str:
    """A kernel or a configuration."""
    if isinstance(value, triton.Config):
        return f"{value.kwargs['BLOCK_N']} x {value.kwargs['BLOCK_K']}, {value.num_warps} warps"
    return str(value.base_fn.__name__)


@pytest.mark.parametrize(("kernel", "config"), TUNING, ids=named)
@pytest.mark.parametrize("shape", [(7, 72, 128, 3, 2), (300, 13, 3, 2, 1)], ids=str)
def test_every_configuration(
    kernel: Any, config: triton.Config, shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever configuration tuning picks, at any height of the blocks, with descriptors of the weights or without,
    the results are those of float64."""
    monkeypatch.setattr(kernel, "configs", [config])
    monkeypatch.setattr(kernel, "early_config_prune", None)
    assert_right(case(*shape, torch.bfloat16), rtol=2e-2)


@pytest.mark.parametrize("shape", [(40, 64, 128, 3, 2), (150, 272, 40, 4, 3), (9, 16, 4, 3, 2)], ids=str)
def test_fp8_experts(shape: tuple[int, int, int, int, int]) -> None:
    """Scales by row and by blocks, which gate and up may share, of weights that lie along K or the other way."""
    x, w_gate_up, w_down, weights, ids = case(*shape, torch.bfloat16)
    codes = w_gate_up.to(torch.float8_e4m3fn), w_down.to(torch.float8_e4m3fn)
    for granularity, side in (("channel", 1), ("block", 128)):
        scales = [
            torch.rand(len(w), -(-w.shape[1] // side), -(-w.shape[2] // side) if side > 1 else 1) + 0.5 for w in codes
        ]
        right = reference("moe_fp8")(x, *codes, *scales, weights, ids, granularity=granularity)[0]
        for given in (codes, [w.transpose(1, 2).contiguous().transpose(1, 2) for w in codes]):
            y = moe_fp8(x, given[0], given[1], *scales, weights, ids, granularity=granularity)
            torch.testing.assert_close(y.double(), right, rtol=2e-2, atol=2e-2 * float(right.abs().max()))


def packed_experts(shape: tuple[int, int, int, int, int], group: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens, any codes, scales and zero-points of groups, and routing."""
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
def test_int4_experts(shape: tuple[int, int, int, int, int], group: int, dtype: torch.dtype) -> None:
    """Groups longer than a tile and shorter, powers of two and others, of codes that lie along K or the other way."""
    x, *tensors = packed_experts(shape, group, dtype)
    right = reference("moe_int4")(x, *tensors)[0]
    share = 2e-2 if dtype == torch.bfloat16 else 1e-5
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in tensors[:6]]
    for given in (tensors[:6], turned):
        y = moe_int4(x, *given, *tensors[6:])
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), right, rtol=share, atol=share * float(right.abs().max()))


@pytest.mark.parametrize("shape", [(0, 4, 4, 2, 2), (5, 0, 4, 2, 2), (5, 4, 0, 2, 2), (5, 4, 4, 0, 2), (5, 4, 4, 2, 0)])
def test_int4_experts_of_nothing_give_zeros(shape: tuple[int, int, int, int, int]) -> None:
    """As those of floats."""
    x, *tensors = packed_experts(shape, 2, torch.bfloat16)
    assert torch.equal(moe_int4(x, *tensors), torch.zeros_like(x))


def test_int4_groups_divide_a_row() -> None:
    """Groups that don't, and a row of half a byte, are refused."""
    tensors = list(packed_experts((5, 12, 8, 2, 2), 4, torch.float32))
    for place, name, wanted in ((3, "scale_gate_up", 12), (4, "scale_down", 8)):
        wrong = [torch.cat([x, x, x], 2)[:, :, :5] if at in (place, place + 2) else x for at, x in enumerate(tensors)]
        with pytest.raises(ValueError, match=f"^{name}: expected a number of groups that divides {wanted}, got 5$"):
            moe_int4(*wrong)
    odd = [x[:, :11] if at in (0, 2, 4, 6) else x for at, x in enumerate(tensors)]
    with pytest.raises(ValueError, match=r"^x: expected D to be even, got D=11$"):
        moe_int4(*odd)


def test_a_half_that_no_copy_may_begin_at() -> None:
    """Weights stored [E,D,2F] whose up half begins within 16 bytes are read element by element."""
    x, w_gate_up, w_down, weights, ids = case(9, 16, 4, 3, 2, torch.bfloat16)
    assert_right((x, w_gate_up.transpose(1, 2).contiguous().transpose(1, 2), w_down, weights, ids), rtol=2e-2)


def transposed(tensor: Tensor) -> Tensor:
    """The same numbers, the first dimension innermost."""
    return tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))


def spread(tensor: Tensor) -> Tensor:
    """The same numbers in every second place of every dimension, NaN or -1 between them."""
    larger = torch.full([2 * size + 1 for size in tensor.shape], float("nan") if tensor.is_floating_point() else -1)
    larger = larger.to(tensor.dtype)
    view = larger[tuple(slice(1, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


def expanded(tensor: Tensor) -> Tensor:
    """The first entry of the first dimension, repeated with stride 0."""
    return tensor[:1].expand(tensor.shape)


@pytest.mark.parametrize("view", [transposed, spread, expanded])
@pytest.mark.parametrize("place", range(5))
def test_any_strides(place: int, view: Callable[[Tensor], Tensor]) -> None:
    """Transposed, sliced and expanded tensors are read where they lie, each of them and all together."""
    tensors = case(40, 9, 7, 6, 3)
    seen = [view(tensor) if number == place else tensor for number, tensor in enumerate(tensors)]
    assert_right((seen[0], seen[1], seen[2], seen[3], seen[4]))
    x, w_gate_up, w_down, weights, ids = map(view, tensors)
    assert_right((x, w_gate_up, w_down, weights, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Half precision is read and written as it is, with the error of its rounding."""
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


@pytest.mark.parametrize("shape", [(0, 4, 3, 2, 2), (5, 0, 3, 2, 2), (5, 4, 0, 2, 2), (5, 4, 3, 0, 2), (5, 4, 3, 2, 0)])
def test_nothing_to_add_gives_zeros(shape: tuple[int, int, int, int, int]) -> None:
    """No tokens or columns give an empty result; no inner size, experts or choices give zeros."""
    tensors = case(*shape)
    assert torch.equal(moe(*tensors), torch.zeros_like(tensors[0]))


def test_a_nan_stays_with_its_token() -> None:
    """NaN in a token, or in an expert, reaches the tokens concerned, and no other row of their blocks."""
    x, w_gate_up, w_down, weights, ids = case(40, 8, 6, 5, 2)
    x[3, 2] = w_down[1, 4, 2] = float("nan")
    concerned = (torch.arange(40) == 3) | (ids == 1).any(1)
    y = moe(x, w_gate_up, w_down, weights, ids)
    assert torch.equal(y.isnan().any(1), concerned)
    assert y[3].isnan().all()
    assert not y[torch.arange(40) != 3][:, [0, 1, 2, 3, 5, 6, 7]].isnan().any()


def test_a_closed_gate_is_zero() -> None:
    """silu(-inf) is zero, and so is its product with a finite number."""
    x, w_down = torch.ones(1, 1), torch.ones(1, 1, 1)
    w_gate_up = torch.tensor([[[-float("inf")], [3.0]]])
    y = moe(x, w_gate_up, w_down, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))
    assert y.tolist() == [[0.0]]
