"""The gradients of the Triton attention over sequences end to end, against autograd in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import attention as forward
from assay.kernels.triton import attention_backward as module
from assay.kernels.triton.attention import attention
from assay.kernels.triton.attention_backward import DKDV_CONFIGS, DQ_CONFIGS
from assay.kernels.triton.attention_varlen import attention_varlen, attention_varlen_backward
from assay.verify import examine_backward
from tests.kernels.test_triton_attention_varlen import MIXED, packed
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

LONG = [64, 128, 1, 63], [128, 0, 65, 130]


def upstream(tensors: list[Tensor]) -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(tensors[0].shape, generator=drawn).to(tensors[0].dtype)


def gradients(tensors: list[Tensor], dout: Tensor, **options: Any) -> list[Tensor]:
    """By autograd."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    return list(torch.autograd.grad(attention_varlen(*leaves, *tensors[3:], **options), leaves, dout))


def assert_right(tensors: list[Tensor], dout: Tensor | None = None, **options: Any) -> None:
    """Within what rounded weights and gradients of scores leave, relative to the largest element."""
    dout = upstream(tensors) if dout is None else dout
    loose = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dout.dtype]
    right = reference("attention_varlen_backward")(*tensors, dout, **options)
    for own, expected in zip(gradients(tensors, dout, **options), right, strict=True):
        assert own.dtype == dout.dtype
        torch.testing.assert_close(own.double(), expected, rtol=0.0, atol=loose * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("config", [*DQ_CONFIGS[:2], *DKDV_CONFIGS[:2], DKDV_CONFIGS[-1]], ids=str)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_tiles_of_any_height(config: Any, causal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences shorter and longer than a tile, empty ones, and ends within it and at its end."""
    kernel = module._attention_dq_kernel if config in DQ_CONFIGS else module._attention_dkdv_kernel
    monkeypatch.setattr(kernel, "configs", [config])
    monkeypatch.setattr(kernel, "early_config_prune", None)
    for lengths in (MIXED, LONG):
        assert_right(packed(*lengths, heads=2, groups=1), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "groups", "width"), [(1, 1, 1), (6, 3, 12), (7, 1, 40)])
def test_heads_of_any_width_and_number(dtype: torch.dtype, heads: int, groups: int, width: int) -> None:
    """Whether a descriptor can copy them or not, and however many share a key head."""
    tensors = packed(*MIXED, heads=heads, groups=groups, width=width, dtype=dtype)
    assert_right(tensors, causal="bottom_right", scale=-0.3)


def test_more_sequences_than_are_looked_through_at_once() -> None:
    lengths = [number % 3 for number in range(150)]
    assert_right(packed(lengths, lengths[::-1], heads=1, groups=1))


def test_a_sequence_has_the_bits_that_attention_gives_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in (forward._attention_kernel, module._attention_dq_kernel, module._attention_dkdv_kernel):
        monkeypatch.setattr(kernel, "configs", kernel.configs[-1:])
        monkeypatch.setattr(kernel, "early_config_prune", None)
    tensors = packed([70, 65], [80, 75])
    dout = upstream(tensors)
    places = 70, 80, 80
    found = [
        x[begin:]
        for x, begin in zip(attention_varlen_backward(*tensors, dout, causal="bottom_right"), places, strict=True)
    ]
    own = [x[begin:].transpose(0, 1)[None].requires_grad_() for x, begin in zip(tensors, places, strict=False)]
    out = attention(*own, causal="bottom_right")
    assert isinstance(out, Tensor)
    for mine, alone in zip(found, torch.autograd.grad(out, own, dout[70:].transpose(0, 1)[None]), strict=True):
        assert torch.equal(mine, alone[0].transpose(0, 1))


def test_any_strides() -> None:
    q, k, v, cu_q, cu_k = packed(*MIXED)
    dout = upstream([q])
    strided = [
        q.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([torch.full_like(k, math.nan), k], -1)[..., 1],
        v.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        torch.stack([cu_q, cu_q + 9], -1)[:, 0],
        torch.stack([cu_k - 9, cu_k], -1)[:, 1],
    ]
    assert_right(strided, torch.stack([dout, torch.full_like(dout, math.nan)], -1)[..., 0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("width", [8, 7])
def test_what_lies_in_another_sequence_stays_there(bad: float, width: int) -> None:
    """A NaN or an infinity in any tensor reaches the gradients of its own sequence, and no others; by descriptor, or
    by pointers where rows lie unevenly."""
    tensors = [*packed([5, 6, 7], [8, 9, 10], width=width)]
    tensors.append(upstream(tensors))
    right = attention_varlen_backward(*tensors)
    for name, place in ((0, 7), (1, 12), (2, 9), (5, 5)):
        spoiled = [x.clone() for x in tensors]
        spoiled[name][place, :, 3] = bad
        for own, expected, (begin, end) in zip(
            attention_varlen_backward(*spoiled), right, ((5, 11), (8, 17), (8, 17)), strict=True
        ):
            assert torch.equal(own[:begin], expected[:begin])
            assert torch.equal(own[end:], expected[end:])


def test_nothing_to_attend_to() -> None:
    """Where there are no keys, or no queries, gradients are zero; without sequences or heads there are none."""
    for tensors in (packed([3, 4], [0, 0]), packed([0, 0], [5, 2]), packed([], []), packed([3], [2], heads=0)):
        found = gradients(tensors, torch.ones_like(tensors[0]))
        assert [x.shape for x in found] == [x.shape for x in tensors[:3]]
        assert not any(x.any() for x in found)


@pytest.mark.parametrize(
    ("dout", "error"),
    [
        (torch.zeros(8, 4, 8).half(), TypeError),
        (torch.zeros(8, 4, 7), ValueError),
        (torch.zeros(8, 4, 8, device="meta"), ValueError),
    ],
)
def test_a_wrong_gradient_is_named(dout: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^dout: expected "):
        attention_varlen_backward(*packed([5, 3], [2, 7]), dout)


def test_the_operators_are_well_registered() -> None:
    tensors = packed(*MIXED, dtype=torch.float16)
    leaves = [x.requires_grad_(x.is_floating_point()) for x in tensors]
    torch.library.opcheck(torch.ops.assay.attention_varlen.default, (*leaves, 0.3, True))
    tensors = packed([3, 2], [2, 4])
    out, lse = torch.ops.assay.attention_varlen.default(*tensors, 0.3, True)
    given = *tensors, out, lse, torch.ones_like(out), torch.zeros_like(lse), 0.3, True
    torch.library.opcheck(torch.ops.assay.attention_varlen_backward.default, given)


def test_compiled_gradients_have_the_same_bits() -> None:
    q, k, v, cu_q, cu_k = packed(*MIXED)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(
        lambda *x: attention_varlen(*x, causal="bottom_right"), backend="aot_eager", fullgraph=True
    )
    found = torch.autograd.grad(compiled(*leaves, cu_q, cu_k), leaves, torch.ones_like(q))
    expected = attention_varlen_backward(q, k, v, cu_q, cu_k, torch.ones_like(q), causal="bottom_right")
    assert all(torch.equal(own, right) for own, right in zip(found, expected, strict=True))


def test_gradients_keep_the_contract() -> None:
    few: dict[str, Any] = {"shapes": {"B": 2, "H": 2, "Hkv": 1, "Tq": 17, "Tk": 35, "D": 16}}
    few |= {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "options": {"causal": ["bottom_right"]}}
    own = "triton.attention_varlen_backward"
    verdict = examine_backward(attention_varlen, "attention_varlen", dtype="bfloat16", backward_contract=own, **few)
    assert verdict.outcome == "PASS", str(verdict)
