"""Faults of attention other than masks: scales, heads, softcap, biases, log-sum-exps, rescaling."""

import math
from typing import Any

import torch

from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.attention_masks import ALL, FORWARD
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import (
    changed,
    has,
    head_groups,
    narrowed,
    one,
    operations,
    option,
    values_beyond_head,
)

Tensor = torch.Tensor
_ONE = ("attention",)


def _scores(alter: Any) -> type:
    """Replace the scores by ``alter(right, q, k, scale)``; ``right`` multiplies by the scale."""
    return operations(scores=lambda xp, right, q, k, scale: alter(right, q, k, scale))


def _unscaled(xp: Any, right: Any, q: Any, k: Any, scale: Any) -> Any:
    xp.held = scale
    return right(q, k, 1.0)


def without_maximum(xp: Any, right: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any = None) -> Any:
    """Compute exp(score) without subtracting the maximum: for float32 evaluations."""
    weights = torch.where(visible, xp.exp(scores), 0.0)
    total = weights.sum(-1, keepdim=True)
    total = total if sinks is None else total + xp.exp(sinks)
    held = torch.where(total == 0, 1.0, total)
    return (weights @ torch.where(values.isfinite(), values, 0.0)) / held, xp.log(total)


def _online(*, rescales_output: bool) -> type:
    """Return an online softmax that omits a rescaling when a tile of 16 keys raises the maximum."""

    def attend(xp: Any, right: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        out, lse = right(scores, visible, values, sinks)
        if scores.shape[-1] <= 16 or sinks is not None:
            return out, lse
        hidden: Any = xp.where(visible, scores, -math.inf)
        total: Any = 0.0
        out, held = 0.0, None
        for first in range(0, scores.shape[-1], 16):
            tile = slice(first, first + 16)
            largest = xp.max(hidden[..., tile])
            largest = largest if held is None else xp.maximum(held, largest)
            shift = xp.where(_is_low(largest), xp.exact(torch.zeros(largest.shape)), largest)
            weights = xp.where(visible[..., tile], xp.exp_shifted(hidden[..., tile], shift), 0.0)
            if held is not None and rescales_output:
                out = out * xp.where(_is_low(held), xp.exact(torch.ones(held.shape)), xp.exp_shifted(held, shift))
            total, out, held = total + xp.sum(weights), out + xp.matmul(weights, values[..., tile, :]), largest
        blind = ~visible.any(-1, keepdim=True)
        return out / xp.where(blind.expand(total.shape), xp.exact(torch.ones(total.shape)), total), lse

    return operations(attend=attend)


def _is_low(x: Any) -> Tensor:
    mid: Tensor = getattr(x, "mid", x)
    return mid == -math.inf


def _probabilities_in_e4m3(
    xp: Any, right: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any
) -> tuple[Tensor, Tensor]:
    weights, lse = xp.attention_weights(scores, visible, sinks)
    return narrowed(weights, "float8_e4m3fn") @ torch.where(values.isfinite(), values, 0.0), lse


def _interleaved(case: Case) -> list[int]:
    """Return the query heads, ordered as if head h used key/value head h modulo Hkv."""
    groups, shared = head_groups(case)
    return [index * groups + group for group in range(groups) for index in range(shared)]


_PER_HEAD = ("q", "dout", "slopes", "sinks")


def _wrong_group(values: Tensors, case: Case) -> Tensors:
    order = _interleaved(case)
    return values | {name: x[order] if x.dim() == 1 else x[:, order] for name, x in values.items() if name in _PER_HEAD}


def _group_back(xp: Any, result: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    order = _interleaved(case)
    back = torch.tensor([order.index(head) for head in range(len(order))], dtype=torch.int64)
    return tuple(
        x[:, back] if "H" in tensor.dims else x for x, tensor in zip(result, case.signature.returns, strict=True)
    )


def _first_head(values: Tensors, case: Case) -> Tensors:
    names = ("k_cache", "v_cache") if case.spec == "attention_decode" else ("k", "v")
    axis = 2 if case.spec == "attention_decode" else 1
    return values | {name: values[name].narrow(axis, 0, 1).expand(values[name].shape) for name in names}


FAULT_MODELS = (
    FaultModel("scale_twice", "scale", "the scale is applied twice", ALL,
        arithmetic=_scores(lambda right, q, k, scale: right(q, k, scale) * scale)),
    FaultModel("scale_dropped", "scale", "the scale of the scores is left out", ALL,
        arithmetic=_scores(lambda right, q, k, scale: right(q, k, 1.0))),
    FaultModel("scale_option_ignored", "scale", "scale= is ignored: always 1 / sqrt(D)", ALL, applies=has("scale"),
        options=option(scale=None)),
    FaultModel("scale_of_head_size_64", "scale", "the scale is that of head size 64, whatever the head size", ALL,
        origin="triton#621", needs="a head size other than 64", options=option(scale=0.125),
        applies=lambda case: case.options["scale"] is None),
    FaultModel("head_size_64", "tail", "only the first 64 elements of a head enter the scores", FORWARD,
        origin="triton#621", needs="a head size above 64",
        inputs=changed("q", lambda q: torch.where(torch.arange(q.shape[-1]) < 64, q, 0.0))),
    FaultModel("exp2_without_log2e", "formula", "exp2 is taken of scores that were not multiplied by log2 e", ALL,
        arithmetic=_scores(lambda right, q, k, scale: right(q, k, scale) * math.log(2))),
    FaultModel("softcap_dropped", "formula", "the softcap is left out", _ONE, origin="sgl-kernel-xpu#491",
        applies=has("softcap"), options=option(softcap=None), needs="scores that are not small beside the cap"),
    FaultModel("softcap_before_scale", "formula", "the softcap is applied before the scale", _ONE,
        applies=has("softcap"), arithmetic=operations(
         scores=_unscaled, softcap=lambda xp, right, scores, cap: right(scores, cap) * xp.held)),
    FaultModel("softcap_not_divided", "formula", "the softcap's tanh is taken of the score itself, not of score / cap",
        _ONE, applies=has("softcap"),
        arithmetic=operations(softcap=lambda xp, right, scores, cap: right(scores * cap, cap))),
    FaultModel("softcap_not_multiplied", "formula", "the softcap's tanh is not multiplied by the cap", _ONE,
        applies=has("softcap"),
        arithmetic=operations(softcap=lambda xp, right, scores, cap: right(scores, cap) / cap)),
    FaultModel("alibi_sign", "formula", "the ALiBi bias is added instead of subtracted", _ONE, applies=has("alibi"),
        inputs=changed("slopes", lambda x: -x)),
    FaultModel("alibi_slope_index", "heads", "ALiBi slopes are those of the head before", _ONE, origin="mlx#3071",
        applies=has("alibi"), inputs=changed("slopes", lambda x: x.roll(1)), needs="more than one head"),
    FaultModel("alibi_slopes_reversed", "heads", "ALiBi slopes are in reverse order of heads", _ONE, origin="mlx#3071",
        applies=has("alibi"), inputs=changed("slopes", lambda x: x.flip(0)), needs="more than one head"),
    FaultModel("alibi_dropped", "formula", "the ALiBi bias is left out", _ONE, applies=has("alibi"),
        inputs=changed("slopes", lambda x: x * 0)),
    FaultModel("sink_ignored", "formula", "the sink is left out of the denominator", _ONE, applies=has("sinks"),
        arithmetic=operations(attend=lambda xp, right, *given: right(*given[:3], None))),
    FaultModel("sink_not_in_lse", "formula", "the log-sum-exp leaves out the sink", _ONE,
        arithmetic=operations(attend=lambda xp, right, *given: (right(*given)[0], right(*given[:3], None)[1])),
        applies=lambda case: case.options["sinks"] and case.options["return_lse"]),
    FaultModel("sink_index", "heads", "sinks are those of the head before", _ONE, applies=has("sinks"),
        inputs=changed("sinks", lambda x: x.roll(1)), needs="more than one head"),
    FaultModel("lse_in_base_2", "formula", "the log-sum-exp is in base 2", _ONE, origin="vllm#47079, #52796",
        applies=has("return_lse"), results=one(1, lambda xp, x: x * (1 / math.log(2)))),
    FaultModel("wrong_head_group", "heads", "head h reads key/value head h modulo Hkv instead of h // (H / Hkv)", ALL,
        origin="FlagGems#3759", needs="several key/value heads, each shared by several", inputs=_wrong_group,
        results=_group_back),
    FaultModel("first_key_value_head", "heads", "every head reads the first key/value head", FORWARD,
        origin="FlagGems#3759", needs="several key/value heads", inputs=_first_head),
    FaultModel("value_columns_beyond_D", "tail", "columns of v beyond the head size of q and k are never computed",
        _ONE, origin="flash-attention#2552", needs="Dv larger than D", results=values_beyond_head(0)),
    FaultModel("attention_without_maximum", "rescale", "the maximum is not subtracted before the exponential", FORWARD,
        needs="scores beyond 88", arithmetic=operations(attend=without_maximum), emulated=True),
    FaultModel("output_not_rescaled", "rescale", "the online softmax rescales neither sum nor output at a new maximum",
        FORWARD, needs="more than 16 keys", arithmetic=_online(rescales_output=False)),
    FaultModel("sum_not_rescaled", "rescale",
        "the online softmax rescales its output, but not its sum, at a new maximum",
        FORWARD, needs="more than 16 keys", arithmetic=_online(rescales_output=True)),
    FaultModel("probabilities_in_e4m3", "precision", "the probabilities are rounded to e4m3", FORWARD,
        arithmetic=operations(attend=_probabilities_in_e4m3),
        contract={"stages": {"probabilities": "float8_e4m3fn"}}),
)  # fmt: skip
