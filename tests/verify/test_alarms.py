"""No false alarm: what honest kernels do that looks like a fault passes, and the fault that it looks like fails."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Contract, examine
from assay.verify.errors import SettingError

from .examined import failure_of, passes, quick


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_infinite_weight_may_meet_what_is_zero_in_exact_arithmetic_alone(dtype: str) -> None:
    """A float32 mean may be off by a rounding: then the centred value isn't zero, and its product isn't NaN."""
    passes(quick(layer_norm, "layernorm", dtype, strict=True))


def test_a_number_at_an_infinite_weight_fails() -> None:
    def masked(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        y = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
        return torch.where(y.abs() < 1e-6, bias.float(), y * weight.float() + bias.float()).to(x.dtype)

    failure = failure_of(quick(masked, "layernorm", "bfloat16"))
    assert failure.kind == "nonfinite"
    assert failure.golden != failure.golden
    assert torch.tensor(failure.got).isfinite()


def gemm_int4(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    codes = torch.stack([qweight & 15, qweight >> 4], 1).reshape(x.shape[1], -1).float()
    group = x.shape[1] // scales.shape[0]
    zeros, scales = (part.float().repeat_interleave(group, 0) for part in (zeros, scales))
    weight = ((codes - zeros) * scales).to(x.dtype)
    return (x.float() @ weight.float()).to(x.dtype)


def test_groups_are_chosen_that_divide_the_sizes_asked_for() -> None:
    """A K of 192 has groups of 32 or 64; what is wrong there alone fails, and a K without groups is refused."""
    seen = set()

    def watched(x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        seen.add((x.shape[1], x.shape[1] // scales.shape[0]))
        return gemm_int4(x, qweight, scales, zeros)

    def wrong_at_192(x: Tensor, *rest: Tensor) -> Tensor:
        return gemm_int4(x, *rest) * (1.02 if x.shape[1] == 192 else 1)

    asked: dict[str, Any] = {
        "dtype": "bfloat16",
        "shapes": {"K": [64, 128, 192]},
        "effort": "quick",
        "examples": 10,
        "shrinking": False,
    }
    assert examine(watched, "gemm_int4", **asked).passed
    assert {size for size, _ in seen} == {64, 128, 192}
    assert {32, 64} <= {group for _, group in seen}
    assert examine(wrong_at_192, "gemm_int4", **asked).outcome == "FAIL"
    with pytest.raises(SettingError, match="K=100; gemm_int4 needs a multiple of 32 or 64 or 128"):
        examine(gemm_int4, "gemm_int4", **{**asked, "shapes": {"K": [100]}})


@pytest.mark.parametrize("isolate", [False, True])
def test_a_default_dtype_that_is_set_once_stays_for_the_kernel_and_is_told(isolate: bool) -> None:
    calls = 0

    def softmax(x: Tensor) -> Tensor:
        nonlocal calls
        if not calls:
            torch.set_default_dtype(torch.bfloat16)
        calls += 1
        return torch.empty(x.shape).copy_(torch.softmax(x.float(), -1))

    verdict = quick(softmax, dtype="bfloat16", isolate=isolate)
    assert verdict.passed, str(verdict)
    assert verdict.left_changed == ("torch's default dtype at torch.bfloat16 (it was torch.float32)",)
    assert torch.get_default_dtype() == torch.float32


def test_a_default_dtype_that_is_never_set_is_not_the_results() -> None:
    """The same kernel fails where nothing made bfloat16 of the memory that it takes."""

    def softmax(x: Tensor) -> Tensor:
        return torch.empty(x.shape).copy_(torch.softmax(x.float(), -1))

    failure = failure_of(quick(softmax, dtype="bfloat16"))
    assert failure.kind == "dtype"


def test_a_kernel_may_use_autograd_inside() -> None:
    """Gradients by torch's autograd, results that still hang on their graph: judged by their numbers."""

    def swiglu_backward(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        leaves = gate.detach().float().requires_grad_(), up.detach().float().requires_grad_()
        y = torch.nn.functional.silu(leaves[0]) * leaves[1]
        return tuple(g.to(gate.dtype) for g in torch.autograd.grad(y, leaves, dy.float(), create_graph=True))

    contract = Contract(nonfinite="unspecified")  # autograd's formula has no limit at infinity
    assert quick(swiglu_backward, "swiglu_backward", "bfloat16", contract=contract, examples=10).passed


def test_the_sign_of_a_zero_counts_where_it_decides() -> None:
    def unsigned_at_zero(x: Tensor) -> Tensor:
        return torch.reciprocal(x.float() + 0.0).to(x.dtype)

    assert quick(lambda x: torch.reciprocal(x), "reciprocal", examples=10).passed
    verdict = quick(unsigned_at_zero, "reciprocal", examples=10)
    assert verdict.failure.kind == "nonfinite"
    assert verdict.failure.got == float("inf")
    assert verdict.failure.golden == float("-inf")


Tensor = torch.Tensor
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "options": {"top_k": [None, 3], "top_p": [0.4]},
    "shapes": {"R": [1, 3], "V": [1, 2, 17]},
    "layouts": ["contiguous"],
    "examples": 5,
    "effort": "quick",
    "every_aspect": False,
}


def from_least(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
    """Sorted upwards; of equal tokens those that the sort puts last stay."""
    ranked, order = x.sort(descending=False)
    if top_k is not None:
        ranked[:, : max(x.shape[1] - top_k, 0)] = -math.inf
    dropped = ranked.softmax(1).cumsum(1) <= 1 - top_p
    dropped[:, -1:] = False
    return torch.empty_like(x).scatter(1, order, ranked.masked_fill(dropped, -math.inf))


def from_most(x: Tensor, *, top_k: int | None, top_p: float, itself: bool = False) -> Tensor:
    """Sorted downwards; of equal tokens the first ones stay. ``itself``: a share counts to what comes before it."""
    ranked, order = x.sort(descending=True, stable=True)
    place = torch.arange(x.shape[1])
    if top_k is not None:
        ranked = ranked.masked_fill(place >= top_k, -math.inf)
    share = ranked.softmax(1)
    before = share.cumsum(1) - (0.0 if itself else share)
    kept = ranked.masked_fill((before >= top_p) & (place > 0), -math.inf)
    return torch.empty_like(x).scatter(1, order, kept)


@pytest.mark.parametrize("kernel", [from_least, from_most])
def test_honest_filters_pass(kernel: Callable[..., Tensor]) -> None:
    assert examine(kernel, "top_filter", **SETTINGS).passed


def test_a_filter_without_infinities_of_its_inputs_is_judged_at_those_it_writes() -> None:
    """``nonfinite="unspecified"`` leaves alone what follows from those of the inputs, not what the op writes."""
    settings = {**SETTINGS, "contract": Contract(nonfinite="unspecified")}
    verdict = examine(from_most, "top_filter", **settings)
    assert verdict.passed, verdict
    assert "beyond what float64 holds" not in str(verdict)

    def kernel(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
        return from_most(x, top_k=top_k, top_p=top_p).nan_to_num(neginf=-1e30)

    assert examine(kernel, "top_filter", **settings).outcome == "FAIL"


def test_a_filter_that_keeps_all_that_equal_the_last_fails() -> None:
    """Each of equal logits may stay, but not more of them than k."""

    def kernel(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
        if top_k is not None:
            x = x.masked_fill(x < x.topk(min(top_k, x.shape[1])).values[:, -1:], -math.inf)
        return from_most(x, top_k=None, top_p=top_p)

    options = {"top_k": [3], "top_p": [0.9]}  # a smaller p drops most of what is too many
    settings = {**SETTINGS, "options": options, "shapes": {"R": [1, 3], "V": [17]}}
    assert examine(from_most, "top_filter", **settings).passed
    verdict = examine(kernel, "top_filter", **settings)
    assert verdict.outcome == "FAIL"
    assert "rows keep another number of elements than the op" in str(verdict)


def test_a_filter_that_drops_the_crossing_token_fails() -> None:
    def kernel(x: Tensor, *, top_k: int | None, top_p: float) -> Tensor:
        return from_most(x, top_k=top_k, top_p=top_p, itself=True)

    verdict = examine(kernel, "top_filter", **SETTINGS)
    assert verdict.outcome == "FAIL"
    assert "the token with which the shares reach p is missing" in str(verdict)
