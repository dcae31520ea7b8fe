"""Fingerprints: the traits of kernels with known insides are read right, and no other is claimed."""

import json
from functools import partial
from typing import Any

import pytest
import torch

from assay.kernels.libraries.pytorch import layer_norm, softmax
from assay.verify.errors import SettingError
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.fingerprint import fingerprint

from . import insides as made
from . import leaning
from .usual import only

UNSEEN = "not observable"
DESCRIBED = {"significant bits", "error growth"}  # figures, not traits of the inside

PLAIN = {
    "repeated calls": "the same bits",
    "accumulator": "24 bits (float32)",
    "accumulator rounding": "to nearest, ties to even",
    "promotion": "none within 512 terms",
    "order of summation": "sequential",
    "blocks": "none within 512 terms",
    "operands": "all 24 bits of float32",
    "store rounding": UNSEEN,
    "subnormal operands": "kept",
    "subnormal results": "kept",
    "overflow": "infinity",
    "NaN": "propagated",
    "batch": "a row alone gives the same bits",
}
"""Of a float32 product of one float32 accumulator."""

ORDER, STORE, ACCUMULATOR, ROUNDING = "order of summation", "store rounding", "accumulator", "accumulator rounding"
NEAREST = {STORE: "to nearest, ties to even"}
USUAL = {
    "float32": PLAIN,
    "bfloat16": PLAIN | NEAREST | {"operands": "all 8 bits of bfloat16", "blocks": "none within 256 terms"},
    "float16": PLAIN | NEAREST | {"operands": "all 11 bits of float16"},
}
UNSTEADY = {"repeated calls": "other bits in another call"}
UNSTEADY |= dict.fromkeys(("promotion", ORDER, "blocks", "batch"), UNSEEN)
HALVES = {"blocks": "2 parts, whatever the length"}
NO_BLOCKS = {"blocks": "no equal ones from the first term on"}
CUT = {ACCUMULATOR: "14 bits", ROUNDING: "toward zero"}
FLUSHED = {"subnormal results": "flushed to zero"}

# Per dtype and name: a kernel, and the traits in which it differs from a usual one.
KINDS: dict[str, dict[str, tuple[Any, dict[str, str]]]] = {
    "float32": {
        "sequential": (made.gemm(), {}),
        "last term first": (
            made.gemm(partial(made.sequential, step=-1)),
            {ORDER: "sequential, last term first", **NO_BLOCKS},
        ),
        "pairwise": (made.gemm(made.pairwise), {ORDER: "pairwise", **HALVES}),
        "blocks of 128": (made.gemm(partial(made.blocked, block=128)), {"blocks": "of 128 terms"}),
        "split in 4": (
            made.gemm(made.split),
            {ORDER: "split into 4 parts, each sequential", "blocks": "4 parts, whatever the length"},
        ),
        "split in any order": (made.split_in_any_order(), UNSTEADY),
        "8 lanes": (
            made.gemm(made.lanes),
            {ORDER: "8 accumulators side by side, each sequential over every 8th term", **NO_BLOCKS},
        ),
        "tf32": (made.gemm(operand=made.to_tf32), {"operands": "truncated to 11 bits (tf32)"}),
        "batch": (
            made.batch_dependent,
            {
                ORDER: "split into 2 parts, each sequential",
                **HALVES,
                "batch": "a row's bits depend on the other rows (M)",
            },
        ),
    },
    "bfloat16": {
        "blocks of 32": (made.gemm(made.blocked), {ORDER: "in blocks of 32, sequential", "blocks": "of 32 terms"}),
        "14 bits, truncating": (made.gemm(add=made.cut_to(14)), CUT),
        "14 bits, promoted": (
            made.gemm(made.promoted, add=made.cut_to(14)),
            {**CUT, "promotion": "every 128 terms, to 24 bits", "blocks": "none within 128 terms"},
        ),
        "matrix unit": (
            made.gemm(made.aligned),
            {
                ACCUMULATOR: "14 bits",
                ROUNDING: "toward zero, each term when it is aligned",
                ORDER: "in steps of 16, each 16 terms at once",
                "blocks": "of 16 terms",
            },
        ),
        "truncating store": (made.gemm(store=made.storing("toward_zero")), {STORE: "toward zero"}),
        "store away on ties": (
            made.gemm(store=made.storing("nearest_away")),
            {STORE: "to nearest, ties away from zero"},
        ),
        "stochastic store": (made.gemm(store=made.storing("stochastic")), {**UNSTEADY, STORE: "stochastic"}),
        "flush": (
            made.gemm(store=made.flushing, operand=made.flushed),
            {"subnormal operands": "flushed to zero", **FLUSHED},
        ),
        "flushing store": (made.gemm(store=made.flushing), FLUSHED),
    },
    "float16": {
        "float16 accumulator": (made.gemm(add=made.in_float16), {ACCUMULATOR: "11 bits (float16)", STORE: UNSEEN}),
        "fmax": (made.gemm(store=made.drops_nan), {"NaN": "dropped", "overflow": UNSEEN}),
        "saturating store": (made.gemm(store=made.storing(overflow="saturate")), {"overflow": "saturates"}),
    },
}
SLOWER = ("last term first", "split in 4", "8 lanes", "14 bits, truncating", "flushing store", "batch", "blocks of 128")


@pytest.mark.parametrize(
    ("dtype", "name"),
    only(lambda row: row[1] not in SLOWER, [(dtype, name) for dtype in KINDS for name in KINDS[dtype]]),
)
def test_insides_are_read_right(dtype: str, name: str) -> None:
    kernel, expected = KINDS[dtype][name]
    card = fingerprint(kernel, "gemm", dtype=dtype)
    seen = {trait.name: trait.value for trait in card.traits if trait.name not in DESCRIBED}
    assert seen == USUAL[dtype] | expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (leaning.nearest, "rounded to bfloat16 before the division"),
        (leaning.truncated, "truncated to bfloat16 before the division"),
        (lambda x, dtype: x, "not rounded"),
    ],
    ids=["rounded", "truncated", "kept"],
)
def test_attention_shows_how_probabilities_are_rounded(stage: leaning.Stage, expected: str) -> None:
    card = fingerprint(leaning.attention(stage), "attention", dtype="bfloat16")
    assert card["probabilities"] == expected
    assert card["accumulator"] == "24 bits (float32)"
    assert card["store rounding"] == "to nearest"


def softmax_in(dtype: torch.dtype) -> Any:
    """log-sum-exp whose sum is kept in ``dtype``."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        most = x.float().amax(-1, keepdim=True)
        weights = torch.exp(x.float() - most).to(dtype)
        total = weights[:, :1]
        for column in range(1, x.shape[1]):
            total = total + weights[:, column : column + 1]
        return (most + total.float().log())[:, 0].to(x.dtype)

    return kernel


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", "24 bits (float32)"), ("float16", "11 bits (float16)"), ("bfloat16", "8 bits (bfloat16)")],
)
def test_sums_of_exponentials_show_their_accumulator(dtype: str, expected: str) -> None:
    card = fingerprint(softmax_in(getattr(torch, dtype)), "logsumexp", dtype="float32")
    assert card["accumulator"] == expected
    assert card["accumulator rounding"] == "to nearest"


@pytest.mark.parametrize(
    ("kernel", "op", "dtype", "expected"),
    [
        (torch.mm, "gemm", "float32", {"accumulator": "24 bits (float32)", "operands": "all 24 bits of float32"}),
        (torch.mm, "gemm", "bfloat16", {"accumulator": "24 bits (float32)", "overflow": "infinity"}),
        (softmax, "softmax", "bfloat16", {"store rounding": "to nearest", "NaN": "propagated"}),
        (layer_norm, "layernorm", "float16", {"store rounding": "to nearest", "NaN": "propagated"}),
    ],
    ids=["mm-float32", "mm-bfloat16", "softmax-bfloat16", "layer_norm-float16"],
)
def test_torch_has_the_traits_that_it_documents(kernel: Any, op: str, dtype: str, expected: dict[str, str]) -> None:
    """Torch's CPU kernels compute in float32 inside, store to nearest, and pass NaN on."""
    card = fingerprint(kernel, op, dtype=dtype)
    assert {name: card[name] for name in expected} == expected


def test_a_card_is_text_json_and_a_page(tmp_path: Any) -> None:
    card = fingerprint(torch.mm, "gemm", dtype="float32")
    assert "accumulator           24 bits (float32)" in str(card)
    content = json.loads(card.to_json(tmp_path / "card.json"))
    assert content["traits"][0] == {
        "name": "repeated calls",
        "value": "the same bits",
        "how": "eight equal calls, at three sizes",
    }
    page = card.to_html(tmp_path / "card.html").read_text()
    assert page.count("<circle") == len(content["growth"]["lengths"])
    assert "http" not in page


def test_a_kernel_that_fails_has_no_traits_of_numbers() -> None:
    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such device")

    card = fingerprint(kernel, "gemm", dtype="float32")
    assert {trait.value for trait in card.traits} == {UNSEEN}
    assert "no such device" in card.traits[1].how


def zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)


def flushing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A sum in float64, whose subnormal results are flushed."""
    y = (a.double() @ b.double()).to(a.dtype)
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, torch.zeros_like(y), y)


def inside_of(kernel: Any, op: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The card without what takes long."""
    monkeypatch.setattr("assay.verify.fingerprint.reading.growth", lambda *_: None)
    return {trait.name: trait.value for trait in fingerprint(kernel, op, dtype=dtype).traits}


def test_no_more_bits_are_claimed_than_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside_of(zeros, "gemm", "float32", monkeypatch)["accumulator"] == UNSEEN
    card = inside_of(flushing, "gemm", "float16", monkeypatch)
    assert card["accumulator"] == "at least 28 bits"  # 2^13 down to 2^-14
    assert card["accumulator rounding"] == UNSEEN


@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("softmax", torch.zeros_like),
        ("softmax", lambda x: torch.full_like(x, torch.nan)),
        ("logsumexp", lambda x: x.new_full(x.shape[:1], 1000.0)),
        ("logsumexp", lambda x: x.new_full(x.shape[:1], torch.inf)),
        ("log_softmax", lambda x: torch.full_like(x, -1000.0)),
    ],
    ids=["zeros", "NaN", "1000", "infinity", "-1000"],
)
def test_results_that_are_no_sum_show_no_accumulator(op: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card = inside_of(kernel, op, "float32", monkeypatch)
    assert card["accumulator"] == card["accumulator rounding"] == UNSEEN


def test_no_growth_is_read_along_a_dimension_that_is_no_sum() -> None:
    card = fingerprint(kernel_of(None, "moe_route"), "moe_route", dtype="float32", options={"top_k": 2})
    assert card["error growth"] == UNSEEN
    assert card.growth is None


def test_mistakes_are_said_in_one_line() -> None:
    with pytest.raises(SettingError, match="expected one value"):
        fingerprint(torch.mm, "attention", dtype="float32", options={"causal": ["none", "top_left"]})
    with pytest.raises(SettingError, match="no trait 'colour'; the card has repeated calls"):
        fingerprint(torch.exp, "exp", dtype="float16")["colour"]
