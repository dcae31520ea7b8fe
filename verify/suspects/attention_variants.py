"""Faults of attention's gradient, of paged caches, and of sequences laid end to end."""

from __future__ import annotations

import math
from typing import Any

import torch

from assay.verify.inputs.cases import Case
from assay.verify.suspects.mechanisms import asked, head_groups, option, swapped, values_beyond_head
from assay.verify.suspects.suspect import Suspect, Tensors

Tensor = torch.Tensor
_BACK = ("attention_backward",)
_DECODE = ("attention_decode",)
_VARLEN = ("attention_varlen",)


class _DeltaDropped:
    """dS = P dP, without the mean of dP that softmax takes away."""

    def attend_backward(
        self: Any, scores: Any, visible: Tensor, q: Any, k: Any, v: Any, dout: Any, scale: Any, terms: int
    ) -> Any:
        blind = ~visible.any(-1)[..., None]
        weights = self.softmax(self.where(visible | blind, scores, -math.inf))
        weights = self.where(visible, weights, 0.0)
        gradient = weights * self.where(visible, self.matmul(dout, self.swap(v)), 0.0) * scale
        transposed = self.swap(gradient)
        dv = super().attend_backward(scores, visible, q, k, v, dout, scale, terms)[2]  # type: ignore[misc]
        return self.matmul(gradient, k), self.matmul(transposed, q), dv


def _gradient_scale(alter: Any) -> type:
    class Scaled:
        def attend_backward(self: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
            q, k, v, dout, scale, terms = rest
            return super().attend_backward(scores, visible, q, k, v, dout, alter(scale), terms)  # type: ignore[misc]

    return Scaled


class _OneHeadOfGroup:
    """Of the query heads that share a key/value head only the first adds to its gradients."""

    def attend_backward(self: Any, scores: Any, visible: Tensor, *rest: Any) -> Any:
        q, k, v, dout, scale, terms = rest
        first = visible.shape[0] // max(head_groups(self.case)[1], 1)
        dq = super().attend_backward(scores, visible, *rest)[0]  # type: ignore[misc]
        part = (q[..., :first, :], k, v, dout[..., :first, :], scale, terms)
        _, dk, dv = super().attend_backward(scores[..., :first, :], visible[:first], *part)  # type: ignore[misc]
        return dq, dk, dv


def _only_whole_pages(values: Tensors, case: Case) -> Tensors:
    page = case.sizes["page"]
    lengths = values["seq_lens"]
    return values | {"seq_lens": torch.where(lengths >= page, lengths // max(page, 1) * max(page, 1), lengths)}


def _one_more_token(values: Tensors, case: Case) -> Tensors:
    most = case.sizes["max_pages"] * case.sizes["page"]
    longer = (values["seq_lens"] + 1).clamp(max=most)
    last = (longer - 1).clamp(min=0) // max(case.sizes["page"], 1)
    table = values["block_table"].clone()
    for row, page in enumerate(last.tolist()):  # an entry behind the last page may be anything
        if 0 <= page < table.shape[1] and not 0 <= int(table[row, page]) < case.sizes["P"]:
            table[row, page] = 0
    return values | {"seq_lens": longer, "block_table": table}


def _pages_in_order(values: Tensors, case: Case) -> Tensors:
    table, pages = values["block_table"], max(case.sizes["P"], 1)
    first = torch.arange(table.numel(), dtype=table.dtype).reshape(table.shape)
    return values | {"block_table": first % pages}


def _pages_of_first(values: Tensors, case: Case) -> Tensors:
    """Every sequence reads the pages of the first."""
    table = values["block_table"][:1].expand(values["block_table"].shape).clone()
    return values | {"block_table": table.clamp(0, max(case.sizes["P"] - 1, 0))}


def _one_sequence(values: Tensors, case: Case) -> Tensors:
    """All tokens as one sequence."""
    joined = {}
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        offsets = values[name].clone()
        offsets[1:] = offsets[-1]
        joined[name] = offsets
    return values | joined


def _keys_one_early(values: Tensors, case: Case) -> Tensors:
    """Each sequence's keys begin one too early."""
    offsets = values["cu_seqlens_k"].clone()
    offsets[1:-1] = (offsets[1:-1] - 1).clamp(min=0)
    return values | {"cu_seqlens_k": offsets}


def _offsets_of_q(values: Tensors, case: Case) -> Tensors:
    """The offsets of the queries used for the keys."""
    most = case.sizes["Tk"]
    offsets = values["cu_seqlens_q"].clamp(max=most).clone()
    offsets[-1] = most
    return values | {"cu_seqlens_k": offsets.to(values["cu_seqlens_k"].dtype)}


SUSPECTS = (
    Suspect("dv_columns_beyond_D", "tail", "columns of dv beyond the head size of q and k are never computed", _BACK,
            origin="flash-attention#2552", needs="Dv larger than D", results=values_beyond_head(2)),
    Suspect("delta_dropped", "formula", "the score gradient leaves out the mean sum P dP", _BACK,
            arithmetic=_DeltaDropped),
    Suspect("gradient_scale_dropped", "scale", "dq and dk are not multiplied by the scale", _BACK,
            arithmetic=_gradient_scale(lambda scale: 1.0)),
    Suspect("gradient_scale_twice", "scale", "dq and dk are multiplied by the scale twice", _BACK,
            arithmetic=_gradient_scale(lambda scale: scale * scale)),
    Suspect("one_head_of_group", "heads", "dk and dv are those of one query head, not summed over the group", _BACK,
            origin="FlagGems#3759", needs="key/value heads that are shared", arithmetic=_OneHeadOfGroup),
    Suspect("k_scale_dropped", "scale", "k_scale is left out", _DECODE, origin="vllm#42580", applies=asked("k_scale"),
            options=option(k_scale=1.0)),
    Suspect("v_scale_dropped", "scale", "v_scale is left out", _DECODE, origin="vllm#42580", applies=asked("v_scale"),
            options=option(v_scale=1.0)),
    Suspect("v_scale_twice", "scale", "v_scale is applied twice", _DECODE, origin="sglang#18396",
            applies=asked("v_scale"), options=lambda options, case: options | {"v_scale": options["v_scale"] ** 2}),
    Suspect("cache_scales_swapped", "scale", "k_scale and v_scale are swapped", _DECODE,
            applies=lambda case: case.options["k_scale"] != case.options["v_scale"],
            options=lambda options, case: options | {"k_scale": options["v_scale"], "v_scale": options["k_scale"]}),
    Suspect("partial_page_dropped", "tail", "the last page is read only if it is full", _DECODE,
            needs="a length that is no multiple of the page", inputs=_only_whole_pages),
    Suspect("one_token_too_many", "tail", "one slot behind the last token is read", _DECODE, inputs=_one_more_token,
            origin="vllm#936"),
    Suspect("block_table_ignored", "layout", "pages are read in the order of memory", _DECODE, inputs=_pages_in_order),
    Suspect("block_table_of_first", "layout", "every sequence reads the pages of the first", _DECODE,
            needs="more than one sequence", inputs=_pages_of_first),
    Suspect("sequences_joined", "mask", "all tokens are taken for one sequence", _VARLEN,
            needs="more than one sequence", inputs=_one_sequence),
    Suspect("keys_one_early", "mask", "each sequence's keys begin and end one too early", _VARLEN,
            needs="more than one sequence", inputs=_keys_one_early, origin="flash-attention#2842"),
    Suspect("offsets_of_q_for_k", "mask", "the offsets of the queries are used for the keys", _VARLEN,
            needs="sequences whose q and k differ in length", inputs=_offsets_of_q, origin="flash-attention#443"),
    Suspect("key_and_value_swapped", "layout", "keys and values are swapped", _DECODE,
            inputs=swapped("k_cache", "v_cache")),
)  # fmt: skip
