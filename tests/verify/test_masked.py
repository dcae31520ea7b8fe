"""`Contract(nonfinite="masked")`: NaN of what is masked or never read may come out where it is multiplied by zero."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.golden.registry import spec
from assay.verify import Contract
from assay.verify.cases.case import all_contents
from assay.verify.cases.sampler import Sampler, seeded, with_values
from assay.verify.comparison.judge import Tolerance, judge
from assay.verify.comparison.oracle import Oracle
from tests.zoo.numerics import load

from .examined import first

Place = tuple[str, tuple[int, ...]]
CAUSAL = {"causal": "bottom_right"}
ATTENTION = {"B": 1, "H": 2, "Hkv": 1, "Sq": 3, "Sk": 4, "D": 8, "Dv": 8}
VARLEN = {"Tq": 6, "Tk": 6, "B": 2, "H": 1, "Hkv": 1, "D": 8}
DECODE = {"B": 2, "H": 2, "Hkv": 1, "D": 8, "P": 4, "page": 2, "max_pages": 1}
LOSS = {"reduction": "none"}

# Op, sizes, options, the element that is spoiled, results that NaN may reach, and some that it may not.
REACHED: dict[str, tuple[str, dict[str, int], dict[str, Any], Place, list[Place], list[Place]]] = {
    "value": (
        "attention", ATTENTION, CAUSAL, ("v", (0, 0, 3, 5)),
        [("out", (0, 0, 0, 5)), ("out", (0, 1, 1, 5))], [("out", (0, 0, 0, 4)), ("out", (0, 1, 0, 0))],
    ),
    "value, unmasked": ("attention", ATTENTION, {}, ("q", (0, 0, 1, 5)), [], [("out", (0, 0, 0, 5))]),
    "key": (
        "attention", ATTENTION, CAUSAL, ("k", (0, 0, 3, 5)),
        [("out", (0, 0, 0, 0)), ("out", (0, 1, 1, 7))], [],
    ),
    "query": ("attention", ATTENTION, CAUSAL, ("q", (0, 0, 1, 5)), [], [("out", (0, 0, 0, 0)), ("out", (0, 1, 1, 0))]),
    "gradient": (
        "attention_backward", ATTENTION, CAUSAL, ("v", (0, 0, 3, 5)),
        [("dq", (0, 0, 0, 0)), ("dq", (0, 1, 1, 3))], [("dv", (0, 0, 0, 0))],
    ),
    "another sequence": (
        "attention_varlen", VARLEN, {}, ("v", (5, 0, 2)), [("out", (0, 0, 2))], [("out", (0, 0, 1))],
    ),
    "ignored label": ("cross_entropy", {"T": 3, "V": 4}, LOSS, ("logits", (1, 2)), [("loss", (1,))], [("loss", (0,))]),
    "unread slot": (
        "attention_decode", DECODE, {}, ("v_cache", (1, 1, 0, 2)),
        [("out", (0, 0, 2)), ("out", (1, 1, 2))], [("out", (0, 0, 1))],
    ),
    "unchosen expert": (
        "moe", {"T": 2, "D": 3, "F": 3, "E": 3, "k": 1}, {}, ("w_down", (2, 1, 0)), [("y", (0, 1))], [("y", (0, 0))],
    ),
}  # fmt: skip
INTEGERS = {
    "cu_seqlens_q": [0, 3, 6],
    "cu_seqlens_k": [0, 3, 6],
    "target": [1, -100, 0],
    "ids": [[0], [1]],
    "block_table": [[0], [1]],
    "seq_lens": [2, 1],
}


def tolerances_of(
    op: str, sizes: Mapping[str, int], options: Mapping[str, Any], spoiled: Place, nonfinite: str
) -> dict[str, Tolerance]:
    """What a contract allows of ordinary numbers with one NaN among them."""
    definition = spec(op)
    drawn = Sampler(definition, "float32").case(seeded(1), options=definition.complete(options))
    edits = ((*spoiled, math.nan),)
    case = with_values(drawn, "normal", sizes=dict(sizes), layouts={}, edits=edits, unused="plain")
    values = all_contents(case)
    values |= {name: torch.tensor(INTEGERS[name], dtype=x.dtype) for name, x in values.items() if name in INTEGERS}
    allowed = Oracle(Contract(nonfinite=nonfinite)).tolerances(case, values)
    return dict(zip((tensor.name for tensor in case.signature.returns), allowed, strict=True))


def admits_nan(allowed: Tolerance, index: tuple[int, ...]) -> bool:
    """Whether NaN in this place is kept, and a wrong number is not."""
    wrong, nan = allowed.golden.clone(), allowed.golden.clone()
    wrong[index] += 1.0
    nan[index] = math.nan
    assert bool(judge(wrong, allowed).broken[index])
    return not bool(judge(nan, allowed).broken[index])


@pytest.mark.parametrize(("op", "sizes", "options", "spoiled", "open_places", "others"), REACHED.values(), ids=REACHED)
def test_nan_may_come_where_it_is_multiplied_by_zero(
    op: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    spoiled: Place,
    open_places: list[Place],
    others: list[Place],
) -> None:
    """It may under "masked", and nowhere else; under "ieee" nowhere; and no wrong number may come in its place."""
    masked, ieee = (tolerances_of(op, sizes, options, spoiled, nonfinite) for nonfinite in ("masked", "ieee"))
    assert all(admits_nan(masked[name], index) for name, index in open_places)
    assert not any(admits_nan(masked[name], index) for name, index in others)
    assert not any(admits_nan(ieee[name], index) for name, index in open_places + others)


def weighted(scores: Tensor, see: Tensor, v: Tensor) -> Tensor:
    """Weights of zero times all values; a row that sees nothing gives zero."""
    weights = torch.where(see.any(-1, keepdim=True), torch.softmax(scores, -1), 0.0)
    return weights @ v


def attention_adding_a_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: str) -> Tensor:
    """-inf is added to a score, which may have overflowed, and what is masked is multiplied by zero."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = load(q), load(k).repeat_interleave(groups, 1), load(v).repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    queries, keys = scores.shape[-2:]
    see = torch.arange(keys)[None] <= torch.arange(queries)[:, None] + keys - queries
    return weighted(scores + torch.where(see, 0.0, -math.inf), see, v)


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, guarded: bool) -> tuple[Tensor, Tensor]:
    """Shares of an unread output are zero, and multiplied with it; unguarded, two empty states give NaN (sglang)."""
    level = torch.maximum(lse_a, lse_b)
    level = torch.where(level == -math.inf, 0.0, level) if guarded else level
    a, b = torch.exp(lse_a - level), torch.exp(lse_b - level)
    total = torch.where(a + b == 0, 1.0, a + b) if guarded else a + b
    shares = (a / total)[..., None], (b / total)[..., None]
    return load(o_a) * shares[0] + load(o_b) * shares[1], level + torch.log(a + b)


SMALL = {"Sq": range(1, 9), "Sk": range(1, 9), "D": [8], "Dv": [8]}
MASKED = {"options": {"causal": ["bottom_right"]}, "shapes": SMALL}


@pytest.mark.parametrize(
    ("op", "kernel", "settings", "outcomes"),
    [
        ("attention", attention_adding_a_mask, MASKED, {"ieee": "FAIL", "masked": "PASS"}),
        ("merge_states", partial(merge, guarded=True), {}, {"ieee": "FAIL", "masked": "PASS"}),
        ("merge_states", partial(merge, guarded=False), {}, {"masked": "FAIL", "unspecified": "PASS"}),
    ],
    ids=["attention", "merge", "two empty states"],
)
def test_zero_times_nan_is_a_freedom_of_its_own(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any], outcomes: dict[str, str]
) -> None:
    """What is masked may turn NaN and the scores that are may overflow; two empty states give a number all the same."""
    for nonfinite, outcome in outcomes.items():
        assert first(kernel, op, contract=Contract(nonfinite=nonfinite), examples=2, **settings).outcome == outcome
