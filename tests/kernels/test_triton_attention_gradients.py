"""The gradients of the Triton attention, against autograd through the reference in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import attention_backward as module
from assay.kernels.triton.attention import attention, attention_backward
from assay.kernels.triton.attention_backward import (
    DKDV_CONFIGS,
    DQ_CONFIGS,
    prune_dkdv_configs,
    prune_dq_configs,
)
from assay.verify import examine_backward
from tests.kernels.conftest import distinct
from tests.kernels.test_triton_attention import MASKS, inputs, per_head
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def gradients(function: Any, tensors: list[Tensor], vectors: dict[str, Tensor], **options: Any) -> list[Tensor]:
    """Of tensors and vectors, from gradients of the output and of the log-sum-exp."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    named = {name: vector.detach().clone().requires_grad_() for name, vector in vectors.items()}
    results = function(*leaves, **named, **options, return_lse=True)
    drawn = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=drawn).to(tensors[0].dtype).to(x.dtype) for x in results]
    return list(torch.autograd.grad(results, [*leaves, *named.values()], upstream))


def assert_right(tensors: list[Tensor], vectors: dict[str, Tensor] | None = None, **options: Any) -> None:
    """Within what rounded weights and gradients of scores leave, relative to the largest element.

    In float32 it is the rounding of scores, up to 130 here, that weights inherit.
    """
    vectors, dtype = vectors or {}, tensors[0].dtype
    found = gradients(attention, tensors, vectors, **options)
    in_float64 = [tensor.double() for tensor in tensors], {name: x.double() for name, x in vectors.items()}
    expected = gradients(reference("attention"), *in_float64, **options)
    loose = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert [x.dtype for x in found] == [dtype] * 3 + [torch.float32] * len(vectors)
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), right, rtol=0.0, atol=loose * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(
    ("queries", "keys"), [(5, 9), (9, 5), (1, 70), (70, 37), pytest.param(130, 67, marks=pytest.mark.evidence)]
)
def test_options_act_together(causal: str, queries: int, keys: int) -> None:
    """Every mask with and without window, softcap, bias and sink, with more keys than queries and with fewer."""
    tensors = inputs(queries, keys, batch=1)
    for window, softcap, alibi, sinks in itertools.product([None, (2, 3)], [None, 1.5], [False, True], [False, True]):
        options = {"window": window, "softcap": softcap, "scale": -0.7 if softcap else None, "alibi": alibi}
        vectors = per_head(4)
        kept = {name: vectors[name] for name, there in (("slopes", alibi), ("sinks", sinks)) if there}
        assert_right(tensors, kept, causal=causal, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "value_width"), [(1, 7), (5, 1), (40, 16), (256, 80), (16, 256)])
def test_heads_of_any_width(dtype: torch.dtype, width: int, value_width: int) -> None:
    assert_right(inputs(17, 33, width=width, value_width=value_width, dtype=dtype), causal="bottom_right")


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (6, 3), (7, 1), (130, 1)])
def test_any_number_of_heads_shares_a_key_head(heads: int, groups: int) -> None:
    assert_right(inputs(3, 9, heads=heads, groups=groups), per_head(heads), causal="bottom_right", alibi=True)


def _shape(config: Any) -> str:
    sides = f"{config.kwargs['BLOCK_M']} x {config.kwargs['BLOCK_N']}"
    return f"{sides}, {config.num_warps} warps, {config.num_stages} stages"


@pytest.mark.parametrize("config", [*distinct(DQ_CONFIGS), *distinct(DKDV_CONFIGS)], ids=_shape)
@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_every_configuration(
    config: Any, causal: str, window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = module._attention_dq_kernel if config in DQ_CONFIGS else module._attention_dkdv_kernel
    monkeypatch.setattr(kernel, "configs", [config])
    monkeypatch.setattr(kernel, "early_config_prune", None)
    assert_right(inputs(150, 300, batch=1, heads=2, groups=1), causal=causal, window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_a_configuration_is_left(dtype: torch.dtype, width: int) -> None:
    """For each dtype and width of heads, in both kernels, for sequences end to end too; float32's have one stage."""
    gradient = torch.zeros(1, dtype=dtype)
    arguments = {"dq_ptr": gradient, "dk_ptr": gradient, "BLOCK_D": width, "BLOCK_DV": width}
    packed = arguments | {"cu_seqlens_k_ptr": torch.zeros(2, dtype=torch.int32)}
    keys = (prune_dkdv_configs(DKDV_CONFIGS, given) for given in (arguments, packed))
    for left in (prune_dq_configs(DQ_CONFIGS, arguments), *keys):
        assert left
        assert {config.num_stages == 1 for config in left} == {dtype == torch.float32}


def test_any_strides() -> None:
    q, k, v = inputs(70, 90)
    dout = torch.randn(2, 4, 70, 12)
    strided = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([torch.full_like(k, math.nan), k], -1)[..., 1],
        v.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.stack([dout, torch.full_like(dout, math.nan)], -1)[..., 0],
    ]
    for own, right in zip(attention_backward(*strided), attention_backward(q, k, v, dout), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-6, atol=1e-6)
    assert_right([x[:1, :1].expand(2, heads, -1, -1) for x, heads in ((q, 4), (k, 2), (v, 2))])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_lies_behind_the_mask_stays_out_of_dq(bad: float) -> None:
    for place in (3, 66, 140):
        q, k, v = inputs(150, 150, batch=1, heads=1, groups=1)
        blind = torch.arange(150).sub(place).abs() > 4
        dout = torch.randn(1, 1, 150, 12)
        right = attention_backward(q, k, v, dout, window=(4, 4), softcap=3.0)[0][0, 0]
        k[0, 0, place], v[0, 0, place] = bad, bad
        dq = attention_backward(q, k, v, dout, window=(4, 4), softcap=3.0)[0][0, 0]
        assert torch.equal(dq[blind], right[blind])


def test_nothing_to_attend_to() -> None:
    """A row that sees nothing has a gradient of zero and adds none; without queries, keys or heads there is none."""
    sinks = per_head(4)["sinks"].requires_grad_()
    q, k, v = (tensor.requires_grad_() for tensor in inputs(9, 3))
    out = attention(q, k, v, causal="bottom_right", sinks=sinks)
    assert isinstance(out, Tensor)
    out[:, :, :6].sum().backward()
    assert all(not x.grad.any() for x in (q, k, v, sinks) if x.grad is not None)
    for sizes in ({"keys": 0}, {"queries": 0}, {"batch": 0}, {"heads": 0}, {"value_width": 0}, {"width": 0}):
        tensors = inputs(**{"queries": 5, "keys": 7, **sizes})
        found = attention_backward(*tensors, torch.ones(*tensors[0].shape[:3], tensors[2].shape[3]))
        assert [x.shape for x in found] == [x.shape for x in tensors]
        assert bool(torch.cat([x.flatten() for x in found]).isfinite().all())


@pytest.mark.parametrize(
    ("dout", "error"),
    [
        (torch.zeros(2, 4, 5, 12).half(), TypeError),
        (torch.zeros(2, 4, 5, 8), ValueError),
        (torch.zeros(2, 4, 5, 12, device="meta"), ValueError),
    ],
)
def test_a_wrong_gradient_is_named(dout: Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^dout: expected "):
        attention_backward(*inputs(), dout)


def test_the_operators_are_well_registered() -> None:
    leaves = [tensor.requires_grad_() for tensor in inputs(70, 3, dtype=torch.float16)]
    vectors = [vector.requires_grad_() for vector in per_head(4).values()]
    torch.library.opcheck(torch.ops.assay.attention.default, (*leaves, *vectors, 0.3, 5.0, -3, 2))
    q, k, v = inputs()
    out, lse = attention(q, k, v, return_lse=True)
    given = q, k, v, None, None, out, lse, torch.ones_like(out), torch.zeros_like(lse), 0.3, None, None, None
    torch.library.opcheck(torch.ops.assay.attention_backward.default, given)


@pytest.mark.parametrize(("batch", "heads", "groups"), [(1, 2, 1), pytest.param(2, 4, 2, marks=pytest.mark.evidence)])
def test_gradients_keep_the_contract(batch: int, heads: int, groups: int) -> None:
    sizes = {"B": batch, "H": heads, "Hkv": groups, "Sq": 33, "Sk": 70, "D": 16, "Dv": 16}
    few: dict[str, Any] = {"shapes": sizes}
    few |= {"effort": "quick", "examples": 0, "layouts": ["contiguous"], "options": {"causal": ["bottom_right"]}}
    own = "triton.attention_backward"
    verdict = examine_backward(attention, "attention", dtype="bfloat16", backward_contract=own, **few)
    assert verdict.outcome == "PASS", str(verdict)
