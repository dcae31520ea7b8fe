"""A failure in one line: ids, layouts, and one fault of several aspects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.verify import Verdict, examine
from assay.verify.examination.diagnosis import _explained_once
from assay.verify.findings import Aspect, Explanation, Fact
from assay.verify.report.html import verdict_page
from assay.verify.report.text import failure_in_words, text_report

FEW: dict[str, Any] = {"effort": "quick", "examples": 0, "dtype": "float32", "every_aspect": False}


def chosen_twice(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits, -1).topk(2, -1)
    return weights / weights.sum(-1, keepdim=True), ids[:, :1].expand(-1, 2).int().contiguous()


def router(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.softmax(logits, -1).topk(2, -1)
    return weights, ids


def next_ids(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = router(logits)
    return weights, (ids + 1) % logits.shape[-1]


def test_ids_are_ids() -> None:
    """No distance between two ids, and no tolerance; of a choice all of its row."""
    options = {"top_k": [2], "renormalize": [True], "scoring": ["softmax"]}
    verdict = examine(chosen_twice, "moe_route", options=options, shapes={"T": [2], "E": [8]}, **FEW)
    assert verdict.failure is not None
    row, index = verdict.failure.index[0], int(verdict.failure.got or 0)
    assert f": ids[{row}] came [{index}, {index}], right is e.g. [" in verdict.failure.message
    tensors = "logits[T,E] -> weights[T,2], ids:int64[T,2]"
    other = examine(next_ids, router, tensors=tensors, shapes={"T": [2], "E": [8]}, **FEW)
    for found in (verdict, other):
        assert found.failure is not None
        assert found.failure.is_of_index
        assert "allowed" not in failure_in_words(found.failure)
        assert not {"off by", "times the radius", "greatest"} & set(_parts(text_report(found)))
        assert "<dt>off by</dt>" not in verdict_page(found)


def _parts(report: str) -> list[str]:
    return [words for words in ("off by", "times the radius", "greatest") if words in report]


def transposed_read(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.as_strided(b.shape, (b.shape[1], 1), b.storage_offset())


def test_a_fault_of_strides_names_tensor_and_layout() -> None:
    shapes = {"M": [3], "K": [4], "N": [5]}
    verdict = examine(transposed_read, "gemm", layouts=["contiguous", "transposed"], shapes=shapes, **FEW)
    assert verdict.failure is not None
    assert verdict.failure.kind == "layout"
    assert failure_in_words(verdict.failure).startswith("M=3, K=4, N=5, b transposed")


def _broken(verdict: Verdict, **fields: Any) -> Aspect:
    return replace(Aspect("broken", 1, failure=verdict.failure), **fields)


def test_one_fault_is_told_once() -> None:
    """By its name, by a relation that few faults have, and where calls return what others should."""
    verdict = examine(lambda x: 2 * torch.softmax(x, -1), "softmax", shapes={"R": [2], "N": [4]}, **FEW)
    twice = (Fact("relation", "all elements of y are 2 times the right ones (8 calls)"),)
    zero = (Fact("relation", "the wrong elements of y are 0 (8 calls)"),)
    told = {"numbers": _broken(verdict, facts=twice), "range": _broken(verdict, facts=twice)}
    assert _explained_once(told)["range"].note == "by the same fault as numbers"
    told = {"numbers": _broken(verdict, facts=zero), "range": _broken(verdict, facts=zero)}
    assert _explained_once(told)["range"].note == ""
    earlier = (Fact("calls", "the wrong elements are the right ones of the call before"),)
    told = {"numbers": _broken(verdict), "determinism": _broken(verdict, facts=earlier), "conduct": _broken(verdict)}
    notes = {name: aspect.note for name, aspect in _explained_once(told).items()}
    assert notes["numbers"].startswith("perhaps by the same fault as determinism")
    assert notes["determinism"] == notes["conduct"] == ""
    named = _broken(verdict, explanations=(Explanation("answer_kept_by_shape", "", 0.0),))
    assert "perhaps" in _explained_once({"numbers": _broken(verdict), "determinism": named})["numbers"].note
