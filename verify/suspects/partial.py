"""Faults of losses, of partial attention that is merged, and of collectives."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.precision.rounding import round_to
from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import asked, cut, is_narrow, one, option, swapped
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
_LOSS, _LOSS_BACK, _MERGE, _REDUCE = (
    ("cross_entropy",), ("cross_entropy_backward",), ("merge_states",), ("all_reduce",),
)  # fmt: skip
_LOSSES = (*_LOSS, *_LOSS_BACK)


def _all_counted(values: Tensors, case: Case) -> Tensors:
    """A token without a label is taken for one of class 0."""
    target = values["target"]
    return values | {"target": torch.where(target == case.options["ignore_index"], 0, target)}


def _factor(places: int, factor: Any) -> Any:
    def results(xp: Any, found: tuple[Any, ...], case: Case) -> tuple[Any, ...]:
        return tuple(x * factor(case) if place < places else x for place, x in enumerate(found))

    return results


class _MeanOfAll:
    """The mean is over all tokens, those without a label among them."""

    def sum(self: Any, x: Any, axis: int = -1, **settings: Any) -> Any:
        found = super().sum(x, axis, **settings)  # type: ignore[misc]
        if axis != 0 or self.case.options["reduction"] != "mean":
            return found
        return found * self.counted / max(self.case.sizes["T"], 1)

    def integers(self: Any, values: Any) -> Any:
        found = super().integers(values)  # type: ignore[misc]
        if not hasattr(self, "counted"):  # the first integers are the targets
            self.counted = float((found != self.case.options["ignore_index"]).sum())
        return found


class _MeanOfAllBackward:
    def integers(self: Any, values: Any) -> Any:
        found = super().integers(values)  # type: ignore[misc]
        if not hasattr(self, "counted"):
            self.counted = float((found != self.case.options["ignore_index"]).sum())
        return found

    def unspecified(self: Any, rows: Any, x: Any) -> Any:
        share = self.counted / max(self.case.sizes["T"], 1) if self.case.options["reduction"] == "mean" else 1.0
        return super().unspecified(rows, x * share)  # type: ignore[misc]


def _label_before(values: Tensors, case: Case) -> Tensors:
    target = values["target"]
    kept = (target == case.options["ignore_index"]) | (target == 0)
    return values | {"target": torch.where(kept, target, target - 1)}


class _LogitsIgnored:
    """The gradient lacks the one of the label."""

    def where(self: Any, mask: Any, x: Any, y: Any) -> Any:
        if not isinstance(y, float) and getattr(mask, "shape", (0,))[-1] == self.case.sizes["V"] != 1:
            return y
        return super().where(mask, x, y)  # type: ignore[misc]


def _smoothing_of_others(options: dict[str, Any], case: Case) -> dict[str, Any]:
    """The smoothing shared by the other V - 1 classes."""
    classes = case.sizes["V"]
    grown = options["label_smoothing"] * classes / max(classes - 1, 1)
    return options | {"label_smoothing": min(1.0, grown)}


def _merged(kind: str) -> Any:
    def definition(xp: Any, o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> tuple[Any, Any]:
        tokens, heads, width = o_a.shape
        scores = xp.stack([lse_a, lse_b], -1).reshape(tokens, heads, 1, 2)
        mid: Tensor = getattr(scores, "mid", scores)
        seen = mid != -math.inf
        weighed = scores * math.log(2) if kind == "base 2" else scores * 0.0 if kind == "average" else scores
        out, lse = xp.merge(weighed, seen, xp.stack([o_a, o_b], 2))
        if kind == "maximum":
            lse = xp.max(xp.where(seen, scores, -math.inf))
        if kind in ("nan", "average"):
            blind = ~seen.any(-1, keepdim=True)
            nan = xp.exact(torch.full(tuple(out.shape), math.nan))
            out = xp.where(blind.expand(tuple(out.shape)), nan, out) if kind == "nan" else out
            lse = xp.logsumexp(xp.where(seen, scores, -math.inf)) if kind == "average" else lse
            if kind == "nan":
                lse = xp.where(blind.expand(tuple(lse.shape)), xp.exact(torch.full(tuple(lse.shape), math.nan)), lse)
        return out.reshape(tokens, heads, width), lse.reshape(tokens, heads)

    return definition


class _ExpOfLse:
    """exp(lse) as it is, which overflows: for float32 evaluations."""

    def merge(self: Any, scores: Tensor, visible: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.where(visible, self.exp(scores), 0.0)
        total = weights.sum(-1, keepdim=True)
        held = torch.where(total == 0, 1.0, total)
        seen = torch.where(visible.transpose(-1, -2), values, 0.0)
        return (weights @ seen) / held, self.log(total)


class _Sentinel:
    """An empty state's log-sum-exp taken as -5e4."""

    def merge(self: Any, scores: Any, visible: Tensor, values: Any) -> Any:
        scores = self.maximum(scores, self.exact(torch.full(tuple(scores.shape), -5e4)))
        seen = torch.ones_like(visible)
        kept = self.where(visible.transpose(-1, -2).expand(tuple(values.shape)), values, 0.0)
        return super().merge(scores, seen, kept)  # type: ignore[misc]


def _total(kind: str) -> Any:
    def definition(xp: Any, shards: Any) -> Any:
        ranks = shards.shape[0]
        if kind == "rank 0":
            return shards[0] if ranks else xp.sum(shards, axis=0)[0]
        if kind == "all but last":
            return xp.sum(cut(shards, 0, ranks - 1 if ranks > 1 else ranks), axis=0)[0]
        if kind == "rank 0 twice":
            return xp.sum(xp.concatenate([shards[:1], shards]), axis=0)[0]
        return xp.sum(shards, axis=0)[0] / max(ranks, 1)

    return definition


class _TwoHops:
    """The sum of a node's ranks is rounded to the input dtype before nodes are added."""

    def sum(self: Any, x: Tensor, axis: int = -1, **settings: Any) -> Tensor:
        dtype = next(iter(self.case.dtypes.values()))
        parts = [round_to(part.sum(axis, keepdim=True).double(), dtype).to(x.dtype) for part in torch.split(x, 2, axis)]
        return torch.cat(parts, axis).sum(axis, keepdim=True) if parts else x.sum(axis, keepdim=True)


SUSPECTS = (
    Suspect("ignored_tokens_count_in_mean", "loss", "the mean divides by all tokens, ignored ones too", _LOSS,
            arithmetic=_MeanOfAll, applies=asked("reduction", "mean"), needs="some tokens without a label"),
    Suspect("ignored_tokens_count_in_gradient", "loss", "the gradient of the mean divides by all tokens", _LOSS_BACK,
            arithmetic=_MeanOfAllBackward, applies=asked("reduction", "mean"), needs="some tokens without a label"),
    Suspect("ignored_tokens_as_class_0", "loss", "a token without a label is taken for one of class 0", _LOSSES,
            inputs=_all_counted, needs="some tokens without a label"),
    Suspect("smoothing_dropped", "loss", "label smoothing is left out", _LOSSES, applies=asked("label_smoothing"),
            options=option(label_smoothing=0.0)),
    Suspect("smoothing_over_others", "loss", "label smoothing is shared by the other V - 1 classes", _LOSSES,
            applies=asked("label_smoothing"), options=_smoothing_of_others),
    Suspect("sum_for_mean", "loss", "the sum stands for the mean", _LOSSES, origin="Liger#680, #968",
            applies=asked("reduction", "mean"), options=option(reduction="sum"), needs="more than one token"),
    Suspect("mean_for_sum", "loss", "the mean stands for the sum", _LOSSES, applies=asked("reduction", "sum"),
            options=option(reduction="mean"), needs="more than one token"),
    Suspect("gradient_of_none_as_mean", "loss", "reduction='none' is differentiated as a mean", _LOSS_BACK,
            origin="Liger#680, #968", applies=asked("reduction", "none"), options=option(reduction="mean"),
            needs="more than one token"),
    Suspect("label_one_less", "loss", "the label of the class before is taken", _LOSSES, inputs=_label_before),
    Suspect("loss_sign", "loss", "the sign is wrong", _LOSSES, results=_factor(1, lambda case: -1.0)),
    Suspect("loss_in_base_2", "loss", "the logarithm is in base 2", _LOSS,
            results=_factor(1, lambda case: 1 / math.log(2))),
    Suspect("label_not_subtracted", "loss", "the gradient is the softmax itself: the label's one is not subtracted",
            _LOSS_BACK, arithmetic=_LogitsIgnored),
    Suspect("merged_lse_in_base_2", "formula", "log-sum-exps are taken to be in base 2", _MERGE,
            origin="vllm#47079, #52796", definition=_merged("base 2")),
    Suspect("merged_average", "formula", "the outputs are averaged, whatever their log-sum-exps", _MERGE,
            definition=_merged("average")),
    Suspect("merged_lse_is_maximum", "formula", "the log-sum-exp is the larger of the two", _MERGE,
            definition=_merged("maximum")),
    Suspect("merged_empty_states_nan", "special values", "two empty states give NaN: -inf - (-inf)", _MERGE,
            origin="flashinfer#4051", definition=_merged("nan"), needs="two empty states"),
    Suspect("merged_without_maximum", "rescale", "exp(lse) is taken without the maximum", _MERGE, arithmetic=_ExpOfLse,
            emulated=True, needs="log-sum-exps beyond 88"),
    Suspect("merged_finite_sentinel", "special values", "-5e4 stands for the log-sum-exp of an empty state", _MERGE,
            origin="flashinfer#4401", arithmetic=_Sentinel, needs="log-sum-exps below -5e4, or two empty states"),
    Suspect("states_swapped", "layout", "each output takes the other's weight", _MERGE, inputs=swapped("o_a", "o_b")),
    Suspect("second_state_dropped", "formula", "the second state is left out where the first is not empty", _MERGE,
            inputs=lambda values, case: values | {"lse_b": torch.where(
             values["lse_a"] == -math.inf, values["lse_b"], -math.inf)}),
    Suspect("merged_lse_in_bits", "formula", "the merged log-sum-exp is in base 2", _MERGE,
            results=one(1, lambda xp, x: x * (1 / math.log(2)))),
    Suspect("only_rank_0", "formula", "the result is rank 0's own", _REDUCE, origin="FasterTransformer#672",
            definition=_total("rank 0"), needs="more than one rank"),
    Suspect("mean_of_ranks", "formula", "the mean over the ranks, not the sum", _REDUCE, definition=_total("mean"),
            needs="more than one rank"),
    Suspect("last_rank_left_out", "tail", "the last rank is left out", _REDUCE, definition=_total("all but last"),
            needs="more than one rank"),
    Suspect("rank_0_twice", "state", "rank 0 is added twice: its buffer was not zeroed", _REDUCE,
            origin="rocm-libraries#9055", definition=_total("rank 0 twice")),
    Suspect("ranks_summed_in_input_dtype", "precision", "sums of two ranks are rounded to the input dtype on the way",
            _REDUCE, origin="TRT-LLM#16753", arithmetic=_TwoHops, emulated=True, needs="more than two ranks",
            applies=is_narrow),
)  # fmt: skip
