"""Faults of losses, of partial attention that is merged, and of collectives."""

import math
from collections.abc import Callable
from typing import Any

import torch

from assay.golden.definitions.losses import cross_entropy, cross_entropy_backward
from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.attention import without_maximum
from assay.verify.explanation.fault_models.attention_masks import nan_of_blind
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import (
    changed,
    has,
    in_case,
    in_input_dtype,
    is_narrow,
    one,
    operations,
    option,
    swapped,
)

Tensor = torch.Tensor
_LOSS, _LOSS_BACK, _MERGE, _REDUCE = (
    ("cross_entropy",), ("cross_entropy_backward",), ("merge_states",), ("all_reduce",),
)  # fmt: skip
_LOSSES = (*_LOSS, *_LOSS_BACK)


def _mean_of_all(right: Callable[..., Any]) -> Callable[..., Any]:
    def definition(xp: Any, logits: Any, target: Any, *, reduction: str, **options: Any) -> Any:
        if not target.shape[0]:
            return right(xp, logits, target, reduction=reduction, **options)
        return right(xp, logits, target, reduction="sum", **options) / target.shape[0]

    return definition


def _ignored_loaded(xp: Any, logits: Any, target: Any, *, ignore_index: int, **options: Any) -> Any:
    """Load an ignored row's logit at its label, even out of bounds, and count it zero times."""
    loss = cross_entropy(xp, logits, target, ignore_index=ignore_index, **options)
    given: Tensor = xp.given["logits"]
    reach = given.untyped_storage().nbytes() // given.itemsize
    first, (row, column) = int(given.storage_offset()), given.stride()
    index: Tensor = first + torch.arange(len(target)) * row + ignore_index * column
    loaded = (target == ignore_index) & (index >= 0) & (index < reach)
    if not bool(loaded.any()):
        return loss
    held = given.as_strided((reach,), (1,), 0)[torch.where(loaded, index, 0)]
    nothing = xp.exact(torch.where(loaded, held, 0.0).double()) * 0.0
    return loss + (nothing if options["reduction"] == "none" else xp.sum(nothing)[0])


def _labels_unmarked(xp: Any, right: Any, mask: Any, x: Any, y: Any) -> Any:
    marks_labels = not isinstance(y, float) and getattr(mask, "shape", (0,))[-1] == xp.case.sizes["V"] != 1
    return y if marks_labels else right(mask, x, y)


def _smoothing_of_others(options: dict[str, Any], case: Case) -> dict[str, Any]:
    classes = case.sizes["V"]
    smoothing = options["label_smoothing"] * classes / max(classes - 1, 1)
    return options | {"label_smoothing": min(1.0, smoothing)}


def _nan_where_empty(xp: Any, right: Any, scores: Any, visible: Tensor, values: Any) -> tuple[Any, ...]:
    return tuple(nan_of_blind(xp, visible, result) for result in right(scores, visible, values))


def _sentinel(xp: Any, right: Any, scores: Any, visible: Tensor, values: Any) -> Any:
    scores = xp.maximum(scores, xp.exact(torch.full(tuple(scores.shape), -5e4)))
    kept = xp.where(visible.transpose(-1, -2).expand(tuple(values.shape)), values, 0.0)
    return right(scores, torch.ones_like(visible), kept)


def _times_ln_2(values: Tensors, case: Case) -> Tensors:
    return values | {name: values[name].double() * math.log(2) for name in ("lse_a", "lse_b")}


def _two_hops(xp: Any, right: Any, x: Tensor, axis: int = -1, **settings: Any) -> Tensor:
    parts = [in_input_dtype(xp, part.sum(axis, keepdim=True)) for part in torch.split(x, 2, axis)]
    return torch.cat(parts, axis).sum(axis, keepdim=True) if parts else x.sum(axis, keepdim=True)


FAULT_MODELS = (
    FaultModel("ignored_tokens_count_in_mean", "loss", "the mean divides by all tokens, ignored ones too", _LOSS,
        definition=_mean_of_all(cross_entropy), applies=has("reduction", "mean"),
        needs="some tokens without a label"),
    FaultModel("ignored_tokens_count_in_gradient", "loss", "the gradient of the mean divides by all tokens", _LOSS_BACK,
        definition=_mean_of_all(cross_entropy_backward), applies=has("reduction", "mean"),
        needs="some tokens without a label"),
    FaultModel("ignored_tokens_as_class_0", "loss", "a token without a label is taken for one of class 0", _LOSSES,
        needs="some tokens without a label", inputs=in_case(
         "target", lambda x, case: torch.where(x == case.options["ignore_index"], 0, x))),
    FaultModel("ignored_labels_loaded", "loss",
        "the label of an ignored token is loaded, from memory before its row, and counted zero times", _LOSS,
        origin="FlagGems", definition=_ignored_loaded,
        needs="a NaN in the memory where an ignored label points"),
    FaultModel("smoothing_dropped", "loss", "label smoothing is left out", _LOSSES, applies=has("label_smoothing"),
        options=option(label_smoothing=0.0)),
    FaultModel("smoothing_over_others", "loss", "label smoothing is shared by the other V - 1 classes", _LOSSES,
        applies=has("label_smoothing"), options=_smoothing_of_others),
    FaultModel("sum_for_mean", "loss", "the sum stands for the mean", _LOSSES, origin="Liger#680, #968",
        applies=has("reduction", "mean"), options=option(reduction="sum"), needs="more than one token"),
    FaultModel("mean_for_sum", "loss", "the mean stands for the sum", _LOSSES, applies=has("reduction", "sum"),
        options=option(reduction="mean"), needs="more than one token"),
    FaultModel("gradient_of_none_as_mean", "loss", "reduction='none' is differentiated as a mean", _LOSS_BACK,
        origin="Liger#680, #968", applies=has("reduction", "none"), options=option(reduction="mean"),
        needs="more than one token"),
    FaultModel("label_one_less", "loss", "the label of the class before is taken", _LOSSES, inputs=in_case(
        "target", lambda x, case: torch.where((x == case.options["ignore_index"]) | (x == 0), x, x - 1))),
    FaultModel("loss_sign", "loss", "the sign is wrong", _LOSSES, results=one(0, lambda xp, x: x * -1.0)),
    FaultModel("loss_in_base_2", "loss", "the logarithm is in base 2", _LOSS,
        results=one(0, lambda xp, x: x * (1 / math.log(2)))),
    FaultModel("label_not_subtracted", "loss", "the gradient is the softmax itself: the label's one is not subtracted",
        _LOSS_BACK, arithmetic=operations(where=_labels_unmarked)),
    FaultModel("merged_lse_in_base_2", "formula", "log-sum-exps are taken to be in base 2", _MERGE,
        origin="vllm#47079, #52796", inputs=_times_ln_2),
    FaultModel("merged_in_base_2", "formula", "log-sum-exps are taken, and given, in base 2", _MERGE,
        origin="vllm#47079, #52796", inputs=_times_ln_2, results=one(1, lambda xp, x: x * (1 / math.log(2)))),
    FaultModel("merged_average", "formula", "the outputs are averaged, whatever their log-sum-exps", _MERGE,
        arithmetic=operations(merge=lambda xp, right, scores, *given: (
         right(scores * 0.0, *given)[0], right(scores, *given)[1]))),
    FaultModel("merged_lse_is_maximum", "formula", "the log-sum-exp is the larger of the two", _MERGE,
        arithmetic=operations(merge=lambda xp, right, scores, seen, values: (
         right(scores, seen, values)[0], xp.max(xp.where(seen, scores, -math.inf))))),
    FaultModel("merged_empty_states_nan", "special values", "two empty states give NaN: -inf - (-inf)", _MERGE,
        origin="flashinfer#4051", arithmetic=operations(merge=_nan_where_empty), needs="two empty states"),
    FaultModel("merged_without_maximum", "rescale", "exp(lse) is taken without the maximum", _MERGE,
        arithmetic=operations(merge=without_maximum), emulated=True, needs="log-sum-exps beyond 88"),
    FaultModel("merged_finite_sentinel", "special values", "-5e4 stands for the log-sum-exp of an empty state", _MERGE,
        origin="flashinfer#4401", arithmetic=operations(merge=_sentinel),
        needs="log-sum-exps below -5e4, or two empty states"),
    FaultModel("states_swapped", "layout", "each output takes the other's weight", _MERGE, inputs=swapped("o_a",
        "o_b")),
    FaultModel("second_state_dropped", "formula", "the second state is left out where the first is not empty", _MERGE,
        inputs=lambda values, case: values | {"lse_b": torch.where(
         values["lse_a"] == -math.inf, values["lse_b"], -math.inf)}),
    FaultModel("merged_lse_in_bits", "formula", "the merged log-sum-exp is in base 2", _MERGE,
        results=one(1, lambda xp, x: x * (1 / math.log(2)))),
    FaultModel("only_rank_0", "formula", "the result is rank 0's own", _REDUCE, origin="FasterTransformer#672",
        inputs=changed("shards", lambda x: x[:1]), needs="more than one rank"),
    FaultModel("mean_of_ranks", "formula", "the mean over the ranks, not the sum", _REDUCE,
        results=one(0, lambda xp, x: x * (1 / max(xp.case.sizes["R"], 1))), needs="more than one rank"),
    FaultModel("last_rank_left_out", "tail", "the last rank is left out", _REDUCE,
        inputs=changed("shards", lambda x: x[: max(x.shape[0] - 1, 1)]), needs="more than one rank"),
    FaultModel("rank_0_twice", "state", "rank 0 is added twice: its buffer was not zeroed", _REDUCE,
        origin="rocm-libraries#9055", inputs=changed("shards", lambda x: torch.cat([x[:1], x]))),
    FaultModel("ranks_summed_in_input_dtype", "precision",
        "sums of two ranks are rounded to the input dtype on the way", _REDUCE, origin="TRT-LLM#16753",
        arithmetic=operations(sum=_two_hops), emulated=True, needs="more than two ranks",
        applies=is_narrow),
)  # fmt: skip
