"""Faults of attention's gradient, of paged caches, and of packed sequences of different lengths."""

import math
from typing import Any

import torch

from assay.verify.cases.case import Case
from assay.verify.explanation.fault_models.fault_model import FaultModel, Tensors
from assay.verify.explanation.fault_models.mutators import (
    has,
    head_groups,
    in_case,
    operations,
    option,
    swapped,
    values_beyond_head,
)

Tensor = torch.Tensor
_BACK = ("attention_backward", "attention_varlen_backward")
_DECODE = ("attention_decode",)
_VARLEN = ("attention_varlen", "attention_varlen_backward")


def _delta_dropped(
    xp: Any, right: Any, scores: Any, visible: Tensor, q: Any, k: Any, v: Any, dout: Any, scale: Any, terms: int
) -> Any:
    """Compute dS = P dP, without subtracting softmax's mean of dP."""
    blind = ~visible.any(-1)[..., None]
    weights = xp.softmax(xp.where(visible | blind, scores, -math.inf))
    weights = xp.where(visible, weights, 0.0)
    gradient = weights * xp.where(visible, xp.matmul(dout, xp.swap(v)), 0.0) * scale
    dv = right(scores, visible, q, k, v, dout, scale, terms)[2]
    return xp.matmul(gradient, k), xp.matmul(xp.swap(gradient), q), dv


def _gradient_scale(alter: Any) -> type:
    def attend_backward(xp: Any, right: Any, *given: Any) -> Any:
        *rest, scale, terms = given
        return right(*rest, alter(scale), terms)

    return operations(attend_backward=attend_backward)


def _one_head_of_group(xp: Any, right: Any, scores: Any, visible: Tensor, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    dout, scale, terms = rest
    first = visible.shape[0] // max(head_groups(xp.case)[1], 1)
    dq = right(scores, visible, q, k, v, dout, scale, terms)[0]
    part = (scores[..., :first, :], visible[:first], q[..., :first, :], k, v, dout[..., :first, :])
    return dq, *right(*part, scale, terms)[1:]


def _only_whole_pages(values: Tensors, case: Case) -> Tensors:
    page = case.sizes["page"]
    lengths = values["seq_lens"]
    return values | {"seq_lens": torch.where(lengths >= page, lengths // max(page, 1) * max(page, 1), lengths)}


def _one_more_token(values: Tensors, case: Case) -> Tensors:
    most = case.sizes["max_pages"] * case.sizes["page"]
    longer = (values["seq_lens"] + 1).clamp(max=most)
    last = (longer - 1).clamp(min=0) // max(case.sizes["page"], 1)
    table = values["block_table"].clone()
    for row, page in enumerate(last.tolist()):  # entries after the last page may have any value
        if 0 <= page < table.shape[1] and not 0 <= int(table[row, page]) < case.sizes["P"]:
            table[row, page] = 0
    return values | {"seq_lens": longer, "block_table": table}


def _one_sequence(values: Tensors, case: Case) -> Tensors:
    joined = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = values[name].clone()
        offsets[1:] = offsets[-1]
        joined[name] = offsets
    return values | joined


def _keys_one_early(values: Tensors, case: Case) -> Tensors:
    offsets = values["cu_seqlens_k"].clone()
    offsets[1:-1] = (offsets[1:-1] - 1).clamp(min=0)
    return values | {"cu_seqlens_k": offsets}


def _offsets_of_q(values: Tensors, case: Case) -> Tensors:
    most = case.sizes["Tk"]
    offsets = values["cu_seqlens_q"].clamp(max=most).clone()
    offsets[-1] = most
    return values | {"cu_seqlens_k": offsets.to(values["cu_seqlens_k"].dtype)}


FAULT_MODELS = (
    FaultModel("dv_columns_beyond_D", "tail", "columns of dv beyond the head size of q and k are never computed", _BACK,
        origin="flash-attention#2552", needs="Dv larger than D", results=values_beyond_head(2)),
    FaultModel("delta_dropped", "formula", "the score gradient leaves out the mean sum P dP", _BACK,
        arithmetic=operations(attend_backward=_delta_dropped)),
    FaultModel("gradient_scale_dropped", "scale", "dq and dk are not multiplied by the scale", _BACK,
        arithmetic=_gradient_scale(lambda scale: 1.0)),
    FaultModel("gradient_scale_twice", "scale", "dq and dk are multiplied by the scale twice", _BACK,
        arithmetic=_gradient_scale(lambda scale: scale * scale)),
    FaultModel("one_head_of_group", "heads", "dk and dv are those of one query head, not summed over the group", _BACK,
        origin="FlagGems#3759", needs="key/value heads that are shared",
        arithmetic=operations(attend_backward=_one_head_of_group)),
    FaultModel("k_scale_dropped", "scale", "k_scale is left out", _DECODE, origin="vllm#42580",
        applies=has("k_scale"), options=option(k_scale=1.0)),
    FaultModel("v_scale_dropped", "scale", "v_scale is left out", _DECODE, origin="vllm#42580",
        applies=has("v_scale"), options=option(v_scale=1.0)),
    FaultModel("v_scale_twice", "scale", "v_scale is applied twice", _DECODE, origin="sglang#18396",
        applies=has("v_scale"), options=lambda options, case: options | {"v_scale": options["v_scale"] ** 2}),
    FaultModel("cache_scales_swapped", "scale", "k_scale and v_scale are swapped", _DECODE,
        applies=lambda case: case.options["k_scale"] != case.options["v_scale"],
        options=lambda options, case: options | {"k_scale": options["v_scale"], "v_scale": options["k_scale"]}),
    FaultModel("partial_page_dropped", "tail", "the last page is read only if it is full", _DECODE,
        needs="a length that is no multiple of the page", inputs=_only_whole_pages),
    FaultModel("one_token_too_many", "tail", "one slot behind the last token is read", _DECODE, inputs=_one_more_token,
        origin="vllm#936"),
    FaultModel("block_table_ignored", "layout", "pages are read in the order of memory", _DECODE,
        inputs=in_case("block_table", lambda x, case: torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
         % max(case.sizes["P"], 1))),
    FaultModel("block_table_of_first", "layout", "every sequence reads the pages of the first", _DECODE,
        needs="more than one sequence", inputs=in_case(
         "block_table", lambda x, case: x[:1].expand(x.shape).clamp(0, max(case.sizes["P"] - 1, 0)))),
    FaultModel("sequences_joined", "mask", "all tokens are taken for one sequence", _VARLEN,
        needs="more than one sequence", inputs=_one_sequence),
    FaultModel("keys_one_early", "mask", "each sequence's keys begin and end one too early", _VARLEN,
        needs="more than one sequence", inputs=_keys_one_early, origin="flash-attention#2842"),
    FaultModel("offsets_of_q_for_k", "mask", "the offsets of the queries are used for the keys", _VARLEN,
        needs="sequences whose q and k differ in length", inputs=_offsets_of_q, origin="flash-attention#443"),
    FaultModel("key_and_value_swapped", "layout", "keys and values are swapped", _DECODE,
        inputs=swapped("k_cache", "v_cache")),
)  # fmt: skip
