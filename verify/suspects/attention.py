"""Faults of attention beside its masks: scales, heads, softcap, biases, log-sum-exps, rescaling."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.precision.rounding import round_to
from assay.verify.inputs.cases import Case
from assay.verify.suspects.attention_masks import ALL, FORWARD
from assay.verify.suspects.mechanisms import asked, changed, head_groups, one, option, values_beyond_head
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
_ONE = ("attention",)


class _ScaleTwice:
    def scores(self: Any, q: Any, k: Any, scale: Any) -> Any:
        return super().scores(q, k, scale) * scale  # type: ignore[misc]


class _ScaleDropped:
    def scores(self: Any, q: Any, k: Any, scale: Any) -> Any:
        return super().scores(q, k, 1.0)  # type: ignore[misc]


class _BaseTwo:
    """exp2 of scores that were not multiplied by log2 e."""

    def scores(self: Any, q: Any, k: Any, scale: Any) -> Any:
        return super().scores(q, k, scale) * math.log(2)  # type: ignore[misc]


class _CapBeforeScale:
    def scores(self: Any, q: Any, k: Any, scale: Any) -> Any:
        self.held = scale
        return super().scores(q, k, 1.0)  # type: ignore[misc]

    def softcap(self: Any, scores: Any, cap: float) -> Any:
        return super().softcap(scores, cap) * self.held  # type: ignore[misc]


class _CapNotDivided:
    def softcap(self: Any, scores: Any, cap: float) -> Any:
        return super().softcap(scores * cap, cap)  # type: ignore[misc]


class _CapNotMultiplied:
    def softcap(self: Any, scores: Any, cap: float) -> Any:
        return super().softcap(scores, cap) / cap  # type: ignore[misc]


class _SinkIgnored:
    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        return super().attend(scores, visible, values, None)  # type: ignore[misc]


class _SinkNotInLse:
    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        out, _ = super().attend(scores, visible, values, sinks)  # type: ignore[misc]
        return out, super().attend(scores, visible, values, None)[1]  # type: ignore[misc]


class _NoMaximum:
    """exp(score) as it is: for float32 evaluations."""

    def attend(self: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
        weights = torch.where(visible, self.exp(scores), 0.0)
        total = weights.sum(-1, keepdim=True)
        total = total if sinks is None else total + self.exp(sinks)
        held = torch.where(total == 0, 1.0, total)
        return (weights @ torch.where(values.isfinite(), values, 0.0)) / held, self.log(total)


class _RescaleForgotten:
    """An online softmax whose sums are not rescaled when a tile of 16 keys raises the maximum."""

    rescales_output = False

    def attend(self: Any, scores: Any, visible: Tensor, values: Any, sinks: Any) -> Any:
        out, lse = super().attend(scores, visible, values, sinks)  # type: ignore[misc]
        if scores.shape[-1] <= 16 or sinks is not None:
            return out, lse
        hidden: Any = self.where(visible, scores, -math.inf)
        total: Any = 0.0
        out, held = 0.0, None
        for first in range(0, scores.shape[-1], 16):
            tile = slice(first, first + 16)
            largest = self.max(hidden[..., tile])
            largest = largest if held is None else self.maximum(held, largest)
            shift = self.where(_is_low(largest), self.exact(torch.zeros(largest.shape)), largest)
            weights = self.where(visible[..., tile], self.exp_shifted(hidden[..., tile], shift), 0.0)
            if held is not None and self.rescales_output:
                out = out * self.where(_is_low(held), self.exact(torch.ones(held.shape)), self.exp_shifted(held, shift))
            total, out, held = total + self.sum(weights), out + self.matmul(weights, values[..., tile, :]), largest
        blind = ~visible.any(-1, keepdim=True)
        return out / self.where(blind.expand(total.shape), self.exact(torch.ones(total.shape)), total), lse


class _SumNotRescaled(_RescaleForgotten):
    """The output is rescaled, the sum of weights is not."""

    rescales_output = True


def _is_low(x: Any) -> Tensor:
    mid: Tensor = getattr(x, "mid", x)
    return mid == -math.inf


def _probabilities_in(format: str) -> type:
    class Narrow:
        def attend(self: Any, scores: Tensor, visible: Tensor, values: Tensor, sinks: Any) -> tuple[Tensor, Tensor]:
            weights, lse = self.attention_weights(scores, visible, sinks)
            weights = round_to(weights.double(), format).to(weights.dtype)
            return weights @ torch.where(values.isfinite(), values, 0.0), lse

    return Narrow


def _interleaved(case: Case) -> list[int]:
    """The query heads in the order in which h modulo Hkv would take their keys."""
    groups, shared = head_groups(case)
    return [place * groups + group for group in range(groups) for place in range(shared)]


_PER_HEAD = ("q", "dout", "slopes", "sinks")


def _wrong_group(values: Tensors, case: Case) -> Tensors:
    order = _interleaved(case)
    return values | {name: x[order] if x.dim() == 1 else x[:, order] for name, x in values.items() if name in _PER_HEAD}


def _group_back(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
    order = _interleaved(case)
    back = torch.tensor([order.index(head) for head in range(len(order))], dtype=torch.int64)
    return tuple(
        x[:, back] if "H" in tensor.dims else x for x, tensor in zip(found, case.signature.returns, strict=True)
    )


def _first_head(values: Tensors, case: Case) -> Tensors:
    names = ("k_cache", "v_cache") if case.spec == "attention_decode" else ("k", "v")
    axis = 2 if case.spec == "attention_decode" else 1
    return values | {name: values[name].narrow(axis, 0, 1).expand(values[name].shape) for name in names}


def _only_64(values: Tensors, case: Case) -> Tensors:
    if case.sizes["D"] <= 64:
        return values
    q = values["q"].clone()
    q[..., 64:] = 0
    return values | {"q": q}


def _scale_of_64(options: dict[str, Any], case: Case) -> dict[str, Any]:
    return options | {"scale": 0.125} if options["scale"] is None else options


SUSPECTS = (
    Suspect("scale_twice", "scale", "the scale is applied twice", ALL, arithmetic=_ScaleTwice),
    Suspect("scale_dropped", "scale", "the scale of the scores is left out", ALL, arithmetic=_ScaleDropped),
    Suspect("scale_option_ignored", "scale", "scale= is ignored: always 1 / sqrt(D)", ALL, applies=asked("scale"),
            options=option(scale=None)),
    Suspect("scale_of_head_size_64", "scale", "the scale is that of head size 64, whatever the head size", ALL,
            origin="triton#621", needs="a head size other than 64", options=_scale_of_64,
            applies=lambda case: case.options["scale"] is None),
    Suspect("head_size_64", "tail", "only the first 64 elements of a head enter the scores", FORWARD,
            origin="triton#621", needs="a head size above 64", inputs=_only_64),
    Suspect("exp2_without_log2e", "formula", "exp2 is taken of scores that were not multiplied by log2 e", ALL,
            arithmetic=_BaseTwo),
    Suspect("softcap_dropped", "formula", "the softcap is left out", _ONE, origin="sgl-kernel-xpu#491",
            applies=asked("softcap"), options=option(softcap=None), needs="scores that are not small beside the cap"),
    Suspect("softcap_before_scale", "formula", "the softcap is applied before the scale", _ONE,
            applies=asked("softcap"), arithmetic=_CapBeforeScale),
    Suspect("softcap_not_divided", "formula", "the softcap's tanh is taken of the score itself, not of score / cap",
            _ONE, applies=asked("softcap"), arithmetic=_CapNotDivided),
    Suspect("softcap_not_multiplied", "formula", "the softcap's tanh is not multiplied by the cap", _ONE,
            applies=asked("softcap"), arithmetic=_CapNotMultiplied),
    Suspect("alibi_sign", "formula", "the ALiBi bias is added instead of subtracted", _ONE, applies=asked("alibi"),
            inputs=changed("slopes", lambda x: -x)),
    Suspect("alibi_slope_index", "heads", "ALiBi slopes are those of the head before", _ONE, origin="mlx#3071",
            applies=asked("alibi"), inputs=changed("slopes", lambda x: x.roll(1)), needs="more than one head"),
    Suspect("alibi_slopes_reversed", "heads", "ALiBi slopes are in reverse order of heads", _ONE, origin="mlx#3071",
            applies=asked("alibi"), inputs=changed("slopes", lambda x: x.flip(0)), needs="more than one head"),
    Suspect("alibi_dropped", "formula", "the ALiBi bias is left out", _ONE, applies=asked("alibi"),
            inputs=changed("slopes", lambda x: x * 0)),
    Suspect("sink_ignored", "formula", "the sink is left out of the denominator", _ONE, applies=asked("sinks"),
            arithmetic=_SinkIgnored),
    Suspect("sink_not_in_lse", "formula", "the log-sum-exp leaves out the sink", _ONE, arithmetic=_SinkNotInLse,
            applies=lambda case: case.options["sinks"] and case.options["return_lse"]),
    Suspect("sink_index", "heads", "sinks are those of the head before", _ONE, applies=asked("sinks"),
            inputs=changed("sinks", lambda x: x.roll(1)), needs="more than one head"),
    Suspect("lse_in_base_2", "formula", "the log-sum-exp is in base 2", _ONE, origin="vllm#47079, #52796",
            applies=asked("return_lse"), results=one(1, lambda xp, x: x * (1 / math.log(2)))),
    Suspect("wrong_head_group", "heads", "head h reads key/value head h modulo Hkv instead of h // (H / Hkv)", ALL,
            origin="FlagGems#3759", needs="several key/value heads, each shared by several", inputs=_wrong_group,
            results=_group_back),
    Suspect("first_key_value_head", "heads", "every head reads the first key/value head", FORWARD,
            origin="FlagGems#3759", needs="several key/value heads", inputs=_first_head),
    Suspect("value_columns_beyond_D", "tail", "columns of v beyond the head size of q and k are never computed", _ONE,
            origin="flash-attention#2552", needs="Dv larger than D", results=values_beyond_head(0)),
    Suspect("attention_without_maximum", "rescale", "the maximum is not subtracted before the exponential", FORWARD,
            needs="scores beyond 88", arithmetic=_NoMaximum, emulated=True),
    Suspect("output_not_rescaled", "rescale", "the online softmax rescales neither sum nor output at a new maximum",
            FORWARD, needs="more than 16 keys", arithmetic=_RescaleForgotten),
    Suspect("sum_not_rescaled", "rescale", "the online softmax rescales its output, but not its sum, at a new maximum",
            FORWARD, needs="more than 16 keys", arithmetic=_SumNotRescaled),
    Suspect("probabilities_in_e4m3", "precision", "the probabilities are rounded to e4m3", FORWARD,
            arithmetic=_probabilities_in("float8_e4m3fn"), contract={"stages": {"probabilities": "float8_e4m3fn"}}),
)  # fmt: skip
