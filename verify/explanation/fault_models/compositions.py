"""Roundings and formulas of kernels in many projects: TF32, products in 16 bits, functions composed of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.formats.rounding import Mode, round_to
from assay.golden.arithmetic import Ball
from assay.golden.inputs.values import torch_dtype
from assay.golden.registry import Spec
from assay.verify.explanation.fault_models.attention_masks import ALL, FORWARD
from assay.verify.explanation.fault_models.fault_model import FaultModel
from assay.verify.explanation.fault_models.mutators import TF32, first_dtype, is_narrow, operations
from assay.verify.explanation.fault_models.ops import gives_numbers

Tensor = torch.Tensor
_LOG2E = 1 / math.log(2)
_NORMS = ("layernorm", "add_layernorm", "group_norm")
_SOFT = ("softmax", "log_softmax", "logsumexp", "cross_entropy")


def _uses(*names: str, besides: tuple[str, ...] = ()) -> Callable[[Spec], bool]:
    """Match ops whose definition uses one of these operations; ``besides`` are ops with a fault of their own."""

    def is_of(op: Spec) -> bool:
        code = getattr(op.definition, "__code__", None)
        used = set() if code is None else {*code.co_names, *(x for x in code.co_consts if isinstance(x, str))}
        own = bool(set(names) & used)
        return gives_numbers(op) and own and op.name not in besides

    return is_of


def _takes_products(op: Spec) -> bool:
    """Match ops with matrix products of numbers in the dtype under examination."""
    return op.name != "gemm_2to4" and ("inputs_in_tf32" in op.faults or _uses("matmul", "scores")(op))


def _stored(x: Any, format: str, mode: Mode = "nearest") -> Any:
    """Return numbers as another format stores them; for a ball, all stored values of its numbers."""
    if isinstance(x, Ball):
        low, high = _stored(x.mid - x.radius, format, mode), _stored(x.mid + x.radius, format, mode)
        known = low.isfinite() & high.isfinite()
        mid, rad = torch.where(known, (low + high) / 2, x.mid), torch.where(known, (high - low) / 2, x.radius)
        return Ball(mid, rad, x.model)
    held = round_to(torch.where(x.isfinite(), x, 0.0).double(), format, mode).to(x.dtype)
    return torch.where(x.isfinite(), held, x)


def _input_dtype(xp: Any, x: Any) -> Any:
    return _stored(x, next(iter(xp.case.dtypes.values())))


def _cut(x: Any) -> Any:
    """Clear the low 13 bits of float32, as tensor cores do."""
    return _stored(x, "tf32", "toward_zero")


def _product(xp: Any, right: Any, a: Any, b: Any, plus: Any = None) -> Any:
    return right(_cut(a), _cut(b), plus)


def _scores(xp: Any, right: Any, q: Any, k: Any, scale: Any) -> Any:
    return xp.matmul(q, xp.swap(k)) * scale


def _attend(xp: Any, right: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
    """Truncate the weights before the division, as online kernels do."""
    out, lse = right(scores, visible, values, sinks)
    mid = getattr(values, "mid", values)
    if sinks is not None or not bool(visible.any(-1).all()) or not bool(mid.isfinite().all()):
        return out, lse
    hidden = xp.where(visible, scores, -math.inf)
    weights = xp.exp_shifted(hidden, xp.max(hidden))
    return xp.matmul(weights, values) / xp.sum(weights), lse


def _query(factor: float) -> type:
    """Round q times the scale and another factor to the input dtype before the product."""

    def scores(xp: Any, right: Any, q: Any, k: Any, scale: Any) -> Any:
        held = _input_dtype(xp, q * (scale * factor))
        return xp.matmul(held, xp.swap(k)) * (1 / factor)

    return operations(scores=scores)


def _scores_rounded(xp: Any, right: Any, q: Any, k: Any, scale: Any) -> Any:
    return _input_dtype(xp, right(q, k, scale))


def _in_16_bits(*, sums: bool) -> type:
    """Compute products of q and k element by element in the input dtype; overflow in float16 is infinite."""

    def scores(xp: Any, right: Any, q: Tensor, k: Tensor, scale: Any) -> Tensor:
        dtype = torch_dtype(next(iter(xp.case.dtypes.values())))
        products = (q[..., :, None, :] * k[..., None, :, :]).to(dtype).to(q.dtype)
        total = products.sum(-1)
        return (total.to(dtype).to(q.dtype) if sums else total) * scale

    def attend(xp: Any, right: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> Any:
        out, lse = right(scores, visible, values, sinks)
        lost = (visible & ~scores.isfinite()).any(-1, keepdim=True) & scores_of(scores, visible).isinf()
        return torch.where(lost, math.nan, out), lse  # inf - inf

    def scores_of(scores: Tensor, visible: Tensor) -> Tensor:
        hidden = torch.where(visible, scores, -math.inf)
        return hidden.amax(-1, keepdim=True) if hidden.shape[-1] else hidden.sum(-1, keepdim=True)

    return operations(scores=scores, attend=attend)


def _max_of_numbers(xp: Any, right: Any, x: Tensor) -> Tensor:
    return right(torch.where(x.isnan(), -math.inf, x))


def _sum_of_numbers(xp: Any, right: Any, x: Tensor, axis: int = -1, **settings: Any) -> Tensor:
    return right(torch.where(x.isnan(), 0.0, x), axis, **settings)


def _plainly(xp: Any, x: Any) -> Any:
    return xp.log(xp.exp(x) + 1.0)


def _softplus(alter: Callable[[Any, Any], Any]) -> type:
    return operations(
        function=lambda xp, right, name, x: alter(xp, x) if name == "softplus" else right(name, x),
        apply=lambda xp, right, name, x: alter(xp, x) if name == "softplus" else right(name, x),
    )


def _tanh(xp: Any, x: Any) -> Any:
    return xp.sigmoid(x * 2.0) * 2.0 - 1.0


def _tanh_of_function(xp: Any, right: Any, name: str, x: Any) -> Any:
    return _tanh(xp, x) if name == "tanh" else right(name, x)


def _by_squares(xp: Any, right: Any, x: Any, eps: float) -> tuple[Any, Any]:
    mean = xp.mean(x)
    variance = xp.mean(x * x) - mean * mean
    return x - mean, xp.rsqrt(xp.maximum(variance, xp.exact(torch.zeros(tuple(variance.shape)))) + eps)


def _as_contiguous(xp: Any, name: str, like: Tensor) -> Tensor:
    """Return a tensor of the call as read with a last stride of one, if its memory is large enough."""
    x: Tensor = xp.given[name]
    taken = (*x.stride()[:-1], 1) if x.dim() else ()
    span = sum((size - 1) * stride for size, stride in zip(x.shape, taken, strict=True)) + 1 if x.numel() else 0
    fits = x.storage_offset() + span <= x.untyped_storage().nbytes() // max(x.itemsize, 1)
    return (x.as_strided(x.shape, taken) if fits else x).to(like.dtype)


def _second_pass_rms(xp: Any, x: Any, weight: Any, *, eps: float, offset: float = 0.0, **options: Any) -> Any:
    root = xp.rsqrt(xp.mean(x * x) + eps)
    return _as_contiguous(xp, "x", x) * root * (weight + offset)


def _second_pass_layer(xp: Any, x: Any, weight: Any, bias: Any, *, eps: float) -> Any:
    _, root = xp.standardize(x, eps)
    return (_as_contiguous(xp, "x", x) - xp.mean(x)) * root * weight + bias


def _second_pass_softmax(xp: Any, x: Any) -> Any:
    largest = xp.max(x)
    return xp.exp_shifted(_as_contiguous(xp, "x", x), largest) / xp.sum(xp.exp_shifted(x, largest))


def _second_pass(name: str, definition: Callable[..., Any]) -> FaultModel:
    return FaultModel(f"second_pass_of_{name}_ignores_stride", "layout",
        "the first pass over a row heeds its stride, the second takes it for one", (name,), "LightLLM",
        "an input whose last stride is not one", definition=definition, emulated=True)  # fmt: skip


FAULT_MODELS = (
    FaultModel("products_in_tf32", "precision",
        f"products are in TF32, whose operands are cut to 10 bits, not rounded: {TF32}", _takes_products,
        "triton#10176, vllm and sglang prefill", applies=first_dtype("float32"),
        arithmetic=operations(matmul=_product, scores=_scores, attend=_attend)),
    FaultModel("query_rounded", "precision", "q times the scale is rounded to the input dtype before the product", ALL,
        "attorch, the classic Triton flash attention", applies=is_narrow, arithmetic=_query(1.0)),
    FaultModel("query_rounded_in_base_2", "precision",
        "q times the scale and log2 e is rounded to the input dtype before the product", ALL,
        "the classic Triton flash attention", applies=is_narrow, arithmetic=_query(_LOG2E)),
    FaultModel("scores_rounded", "precision", "scores are rounded to the input dtype before the softmax", ALL,
        "eager code, as Hugging Face's", applies=is_narrow, arithmetic=operations(scores=_scores_rounded),
        contract={"stages": {"scores": "input"}}),
    FaultModel("scores_multiplied_in_input_dtype", "precision",
        "q and k are multiplied in the input dtype before they are added up: it overflows in float16", ALL,
        "sglang's decode attention", applies=is_narrow, arithmetic=_in_16_bits(sums=False), emulated=True),
    FaultModel("scores_in_input_dtype", "precision",
        "q and k are multiplied, and the sum is rounded, in the input dtype: it overflows in float16", ALL,
        "vLLM's decode attention", applies=is_narrow, arithmetic=_in_16_bits(sums=True), emulated=True),
    FaultModel("loss_maximum_from_zero", "rescale", "the running maximum starts at zero instead of minus infinity",
        ("cross_entropy", *FORWARD), "FlagGems", needs="rows whose logits all lie below -88", emulated=True,
        arithmetic=operations(max=lambda xp, right, x: right(x).clamp(min=0))),
    FaultModel("nan_dropped_by_maximum", "special values",
        "a NaN is passed over by the maximum and the sum: its neighbours get numbers", _SOFT, "FlagGems",
        "one NaN among the inputs", emulated=True, arithmetic=operations(max=_max_of_numbers, sum=_sum_of_numbers)),
    _second_pass("rmsnorm", _second_pass_rms),
    _second_pass("layernorm", _second_pass_layer),
    _second_pass("softmax", _second_pass_softmax),
    FaultModel("tanh_by_sigmoid", "precision", "tanh is computed as 2 sigmoid(2x) - 1, which cancels near zero",
        lambda op: op.name == "tanh" or _uses("tanh")(op), "attorch", "numbers near zero",
        arithmetic=operations(tanh=lambda xp, right, x, absolute=False: _tanh(xp, x), function=_tanh_of_function)),
    FaultModel("softplus_by_logarithm", "precision", "softplus is computed as log(1 + e^x): zero below -17 in float32",
        _uses("softplus", besides=("logsigmoid",)), "attorch", "numbers below -8",
        arithmetic=_softplus(_plainly)),
    FaultModel("softplus_by_sigmoid", "precision", "the logarithm is taken of a sigmoid: zero above 17, -inf below -88",
        _uses("softplus", besides=("logsigmoid",)), "attorch", "numbers beyond 8",
        arithmetic=_softplus(lambda xp, x: -xp.log(xp.sigmoid(-x)))),
    FaultModel("variance_from_squares", "precision", "the variance is E[x^2] - E[x]^2, which cancels",
        lambda op: op.name in _NORMS or _uses("standardize", besides=("layernorm_backward",))(op),
        "pytorch#51102, Liger's group norm", "rows with a mean far from zero",
        arithmetic=operations(standardize=_by_squares)),
    FaultModel("activation_rounded", "precision",
        "the activation is rounded to the input dtype before it is multiplied", ("swiglu",), "unsloth, as Hugging Face",
        applies=is_narrow, arithmetic=operations(
         gated_product=lambda xp, right, x, gate, y: _input_dtype(xp, xp.gate_mul(x, gate)) * y)),
    FaultModel("gated_product_of_minus_infinity", "special values", "x sigmoid(x) is NaN at minus infinity",
        ("swiglu", "swiglu_backward"), needs="minus infinity in the input", emulated=True,
        arithmetic=operations(gate_mul=lambda xp, right, x, gate: x * gate)),
)  # fmt: skip
