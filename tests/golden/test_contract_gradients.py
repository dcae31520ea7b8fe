"""The default contract's radius holds honest float32 functions, losses and gradients, and not coarser ones.

Largest share of the radius that any of them used: see `report`'s lines; above one would be a false alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from assay.golden.arithmetic.real import torch_function
from assay.golden.definitions.unary import FUNCTIONS
from tests.golden import honest_gradients as honest
from tests.golden.allowance import KINDS, Use, rows, uses, worst
from tests.golden.float32 import Functions

Tensor = torch.Tensor
Call = tuple[tuple[Tensor, ...], dict[str, Any]]
SIGNS = (0, 1, -1)
LARGEST = torch.finfo(torch.float32).max / 2
FEW = tuple(kind for kind in KINDS if kind not in ("nearly overflowing", "huge", "subnormal", "small"))


def report(op: str, found: list[Use], record_property: Any) -> None:
    """Assert that the radius held; leave the largest share of it in the report."""
    most = worst(found)
    record_property("share", most.ratio)
    print(f"{op}: {most.ratio:.3f} by {most.kernel}, result {most.result}, {most.where}, of {len(found)} evaluations")
    assert most.ratio <= 1, most


@pytest.mark.parametrize("op", FUNCTIONS)
def test_honest_functions_keep_the_contract(op: str, record_property: Any) -> None:
    """As far off as their ulps allow, and composed of others: within the radius."""
    found: list[Use] = []
    for kind, sign in ((kind, sign) for kind in KINDS for sign in SIGNS):
        x = rows(kind, 3, 40)
        x = torch.where(torch_function(op, x.double()).abs() > LARGEST, 1.0, x)  # what lies beyond is the store's
        results = ((name, function(x)) for name, function in honest.functions(op, sign))
        found += uses(op, (x,), {}, results, where=f"{kind}, {sign}")
    report(op, found, record_property)


def of_softmax(kind: str, n: int) -> Iterator[Call]:
    yield (torch.softmax(rows("normal", 3, n), -1), rows(kind, 3, n)), {}
    yield (rows("lognormal", 3, n), rows(kind, 3, n)), {}


def of_norm(kind: str, n: int) -> Iterator[Call]:
    for dy in ("normal", "lognormal", "cancelling"):
        yield (rows(kind, 5, n), rows("normal", 1, n)[0], rows(dy, 5, n, seed=1)), {}


def of_swiglu(kind: str, n: int) -> Iterator[Call]:
    for up in ("normal", "lognormal"):
        yield (rows(kind, 3, n), rows(up, 3, n), rows("normal", 3, n, seed=1)), {}


def labelled(kind: str, n: int) -> Iterator[Call]:
    target = torch.arange(4) % n
    target[1] = -100
    for reduction, smoothing in (("mean", 0.0), ("sum", 0.25), ("none", 0.9), ("mean", 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100}
        yield (rows(kind, 4, n), target), options


ROWS: dict[str, tuple[Callable[..., Iterator[tuple[str, Any]]], Callable[[str, int], Iterator[Call]]]] = {
    "softmax_backward": (honest.softmax_backwards, of_softmax),
    "layernorm_backward": (honest.layernorm_backwards, of_norm),
    "rmsnorm_backward": (honest.rmsnorm_backwards, of_norm),
    "swiglu_backward": (honest.swiglu_backwards, of_swiglu),
    "cross_entropy": (honest.cross_entropies, labelled),
    "cross_entropy_backward": (honest.cross_entropy_backwards, labelled),
}


@pytest.mark.parametrize("op", ROWS)
def test_honest_gradients_keep_the_contract(op: str, record_property: Any) -> None:
    """Any order of summation, any of the formulas in use, functions as bad as allowed: within the radius."""
    kernels, calls = ROWS[op]
    found: list[Use] = []
    for n, kind in ((n, kind) for n in (1, 2, 33) for kind in FEW):
        for tensors, options in calls(kind, n):
            sign = SIGNS[(FEW.index(kind) + n) % 3]
            results = kernels(Functions(sign), *tensors, **options)
            found += uses(op, tensors, options, results, where=f"{kind} x {n}, {options}, {sign}")
    report(op, found, record_property)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_attention_gradients_keep_the_contract(dtype: torch.dtype, record_property: Any) -> None:
    """delta from the probabilities or the output, both stages rounded, the scale anywhere: within the radius."""
    name = str(dtype).removeprefix("torch.")
    found: list[Use] = []
    for index, kind in enumerate(
        ("normal", "wide", "positive", "large mean", "ties", "cancelling", "peaked", "near zero")
    ):
        for queries, keys in ((5, 1), (7, 19)):
            q, dout = (rows(k, queries, 8, seed)[None, None] for k, seed in ((kind, 0), ("normal", 2)))
            k, v = (rows(k, keys, 8, seed)[None, None] for k, seed in (("normal", 1), (kind, 3)))
            tensors = tuple(part.to(dtype) for part in (q, k, v, dout))
            for causal in ("none", "bottom_right"):
                stage = None if dtype == torch.float32 else dtype
                kernels = honest.attention_backwards(Functions(SIGNS[index % 3]), *tensors, stage, causal=causal)
                where = f"{kind}, {queries} x {keys}, {causal}"
                found += uses("attention_backward", tensors, {"causal": causal}, kernels, dtype=name, where=where)
    report(f"attention_backward {name}", found, record_property)


X, Y, DY, W = (
    rows("normal", 8, 64),
    torch.softmax(rows("normal", 8, 64), -1),
    rows("normal", 8, 64, 1),
    rows("normal", 1, 64)[0],
)
TARGET = torch.arange(8)
half = honest.rounded
COARSE: dict[str, tuple[str, tuple[Tensor, ...], Callable[[], Any]]] = {
    "softmax: a bfloat16 sum": ("softmax_backward", (Y, DY), lambda: Y * (DY - half((Y * DY).sum(-1, True)))),
    "layernorm: bfloat16 rows": (
        "layernorm_backward",
        (X, W, DY),
        lambda: next(r for _, r in honest.layernorm_backwards(Functions(0), half(X), W, DY)),
    ),
    "rmsnorm: bfloat16 weight": (
        "rmsnorm_backward",
        (X, W, DY),
        lambda: next(r for _, r in honest.rmsnorm_backwards(Functions(0), X, half(W), DY)),
    ),
    "swiglu: a bfloat16 gate": (
        "swiglu_backward",
        (X, DY, W.expand(8, 64)),
        lambda: next(r for _, r in honest.swiglu_backwards(Functions(0), half(X), DY, W.expand(8, 64))),
    ),
    "cross-entropy of bfloat16 logits": (
        "cross_entropy",
        (X, TARGET),
        lambda: torch.nn.functional.cross_entropy(half(X), TARGET),
    ),
    "its gradient by bfloat16 shares": (
        "cross_entropy_backward",
        (X, TARGET),
        lambda: (half(torch.softmax(X, -1)) - torch.eye(8, 64)) / 8,
    ),
}


@pytest.mark.parametrize("name", COARSE)
def test_a_coarser_gradient_breaks_the_contract(name: str, record_property: Any) -> None:
    """With one thing rounded to bfloat16 on the way the results are beyond the radius."""
    op, tensors, evaluate = COARSE[name]
    share = worst(uses(op, tensors, {}, [(name, evaluate())])).ratio
    record_property("share", share)
    assert share > 2


@pytest.mark.parametrize("stage", ["probabilities", "score_gradient"])
def test_stages_are_allowed_only_where_the_contract_says_so(stage: str) -> None:
    """float32 inputs with one stage rounded to bfloat16 are beyond the default radius."""
    q, k, v, dout = (rows("normal", 16, 16, seed)[None, None] for seed in range(4))
    results = honest.attention_backwards(Functions(0), q, k, v, dout, torch.bfloat16)
    honest_ones = honest.attention_backwards(Functions(0), q, k, v, dout, None)
    assert worst(uses("attention_backward", (q, k, v, dout), {}, honest_ones)).ratio <= 1
    place = 2 if stage == "probabilities" else 0
    found = [use for use in uses("attention_backward", (q, k, v, dout), {}, results) if use.result == place]
    assert worst(found).ratio > 2
