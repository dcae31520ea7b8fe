"""The acceptance benchmark of `assay.compare`: what it takes for a right report."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.compare.honest import honest
from benchmarks.compare.mismatches import MISMATCHES, planted
from benchmarks.compare.run import has_any, judged, line, named_rightly, pairs, summary

SCALE = next(mismatch for mismatch in MISMATCHES if mismatch.name == "softmax-scale")
LAYER = SCALE.layer("llama")


def region(name: str = "", a: str = "within", b: str = "within", cause: str | None = None) -> Any:
    return SimpleNamespace(name=name, kind="attention", status_a=a, status_b=b, cause=cause, share=0.0)


def report(first: Any = None, *others: Any) -> Any:
    regions = [region("model.norm"), *([] if first is None else [first]), *others]
    return SimpleNamespace(first_beyond=first, regions=regions, verdict="a", difference=2.0, explained=0.9)


def test_there_are_enough_pairs_and_each_has_its_name() -> None:
    names = [pair.name for _, pair in pairs((), ("planted", "honest"))]
    assert len(set(names)) == len(names)
    assert len({mismatch.name for mismatch, _ in planted()}) >= 34
    assert len({pair.case for pair in honest()}) >= 30
    assert [pair.name for _, pair in pairs(("rotary-keys",), ("planted",))] == ["rotary-keys@deepseek_v3"]


@pytest.mark.parametrize(
    ("first", "by_region", "right"),
    [
        (region(f"model.layers.{LAYER}.self_attn", b="beyond", cause="another softmax scale"), True, True),
        (region(f"model.layers.{LAYER}.self_attn", b="beyond", cause="rounding"), True, False),
        (region(f"model.layers.{LAYER}.self_attn", b="beyond"), True, False),
        (region(f"model.layers.{LAYER}1.self_attn", b="beyond", cause="another softmax scale"), False, False),
        (region(f"model.layers.{LAYER}.self_attn", "beyond", "beyond", "another softmax scale"), False, False),
        (region(f"model.layers.{LAYER}.self_attn", "beyond", "within", "another softmax scale"), False, False),
        (None, False, False),
    ],
)
def test_a_mismatch_must_be_named_in_its_layer_in_run_b_and_by_its_cause(
    first: Any, by_region: bool, right: bool
) -> None:
    result = judged(SCALE, "llama", report(first))
    assert (result["by_region"], result["right"]) == (by_region, right)


def test_another_kind_of_region_is_not_the_right_one() -> None:
    first = SimpleNamespace(
        name=f"layers.{LAYER}.mlp.down_proj", kind="product", status_a="within", status_b="beyond", cause="scale"
    )
    assert not judged(SCALE, "llama", report(first))["by_region"]


@pytest.mark.parametrize("status", ["a", "b"])
def test_an_honest_pair_has_nothing_beyond(status: str) -> None:
    assert judged(None, "llama", report())["right"]
    assert not judged(None, "llama", report(None, region("x", **{status: "beyond"})))["right"]
    assert judged(None, "llama", report(None, region("x", **{status: "open"})))["right"]


@pytest.mark.parametrize(
    ("name", "region", "right"),
    [
        ("final-norm", "model.norm", True),
        ("final-norm", "model.layers.0.input_layernorm", False),
        ("rope-theta", "model.rotary_emb", True),
        ("rope-theta", "model.layers.0.self_attn rotary embedding", True),
        ("rope-theta", "model.layers.1.self_attn rotary embedding", False),
        ("eps", "model.layers.0.post_attention_layernorm", False),
        ("eps", "blk.0.attn_norm", True),
    ],
)
def test_a_region_outside_of_layers_is_not_one_inside(name: str, region: str, right: bool) -> None:
    mismatch = next(mismatch for mismatch in MISMATCHES if mismatch.name == name)
    assert named_rightly(mismatch, "llama", region) == right


def test_words_are_found_in_any_way_of_writing_them() -> None:
    assert has_any("Log-softmax in BF16", ("log_softmax",))
    assert not has_any("", ("log_softmax",))
    assert not has_any("norm", ("log_softmax",))


def test_totals() -> None:
    common = {"seconds": 3.0, "undisturbed": True}
    good = judged(SCALE, "llama", report(region(f"layers.{LAYER}.attn", b="beyond", cause="scale"))) | common
    results = [
        good | {"name": "softmax-scale@llama", "planted": True},
        {"name": "mask@llama", "planted": True, "error": "KeyError: 'q'", "seconds": 130.0},
        judged(None, "llama", report()) | common | {"name": "sdpa@llama", "planted": False, "undisturbed": False},
    ]
    assert summary(results) == [
        "planted: 1 of 2 named first by region, 1 by region and cause",
        "honest: 0 of 1 with anything named",
        "pairs that ended in an error: 1",
        "pairs of more than 120 s: 1",
        "pairs that recording changed: 1",
        "median of |sum of shares - 1| over 1 pairs: 0.100 (at most 0.15)",
    ]
    shown = [line(result["name"], result) for result in results]
    assert "right: layers" in shown[0]
    assert "ERROR KeyError: 'q'" in shown[1]
    assert "RECORDING CHANGED IT" in shown[2]
