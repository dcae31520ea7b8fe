"""A cut of a call is a call of its own: what specs say of their axes is true, place by place."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.golden import specs
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.cutting import Axis, Cut, axes_of, cut
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.registry import Spec, Tile, spec


def usual_calls(op: Spec) -> list[Recipe]:
    """A call under the default options, and one for each other usual value of an option."""
    changes = [{}, *({name: value} for name, option in op.options.items() for value in option.usual)]
    return [recipe(op.name, sizes_of(op, change), options=change) for change in changes]


def sizes_of(op: Spec, options: dict[str, Any]) -> dict[str, int]:
    """Small sizes, all different where that may be; heads in groups of two."""
    signature, sizes = op.signature(options), dict[str, int]()
    for place, symbol in enumerate(sorted(signature.symbols, key=lambda name: (name in op.sizes.multiples, name))):
        step, few = op.step(signature, symbol, sizes), op.sizes.allowed.get(symbol)
        if symbol in op.axes.groups:
            sizes[symbol] = 2 * sizes[op.axes.groups[symbol]]
        else:
            sizes[symbol] = (
                few[min(2, len(few) - 1)] if few else -(-(9 + place) // step) * step * (2 if step > 1 else 1)
            )
    return sizes


CALLS = [call for op in map(spec, specs()) for call in usual_calls(op)]


def goldens(call: Recipe, values: dict[str, torch.Tensor], options: Any = None) -> list[Golden]:
    """The certified results of a call with these tensors."""
    keywords = {tensor.name: values[tensor.name] for tensor in call.signature.tensors if tensor.keyword}
    tensors = [values[tensor.name] for tensor in call.signature.tensors if not tensor.keyword]
    results = run(call.definition, BallArithmetic(), tensors, {**(options or call.options), **keywords})
    return [golden_of(result) for result in results]


def random_cut(call: Recipe, values: dict[str, torch.Tensor], chance: random.Random) -> tuple[Cut, Any]:
    """Some blocks of each axis and some neighbours of each part, and the options of these."""
    op, sizes, options = call.definition, call.sizes, call.options
    axes = axes_of(op, call.signature, sizes, op.row_axis(options))
    some = {axis: sorted(chance.sample(range(axis.blocks), chance.randint(1, axis.blocks))) for axis in axes}
    tile = None
    for symbol, rule in op.axes.tiling.items():
        first = chance.randrange(sizes[symbol])
        tile = rule(first, chance.randint(1, sizes[symbol] - first), sizes, options, values)
        options = tile.options if tile else options
    return cut(op, call.signature, sizes, {axis: torch.tensor(kept) for axis, kept in some.items()}, tile), options


def compared(call: Recipe) -> tuple[int, int]:
    """Of eight cuts: how many elements were compared, and how many are not those of the whole."""
    chance, values, wrong, count = random.Random(0), call.named(), 0, 0
    wholes = goldens(call, values)
    for _ in range(8):
        made, options = random_cut(call, values, chance)
        parts, _ = made.inputs(call.definition, call.signature, values)
        for result, whole, part in zip(call.signature.returns, wholes, goldens(call, parts, options), strict=True):
            if not made.is_complete(result):
                continue
            value, radius = made.of(result, whole.value), made.of(result, whole.radius)
            count += value.numel()
            if value.shape != part.value.shape:
                wrong += 1
                continue
            off = (value.double() - part.value.double()).abs()
            same = (value == part.value) | (value.isnan() & part.value.isnan())  # infinities too
            wrong += int((~((off <= radius + part.radius) | same)).sum())
    return count, wrong


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call}"[:70])
def test_the_golden_of_a_part_is_the_part_of_the_golden(call: Recipe) -> None:
    """Whatever blocks of whatever axes are kept, the op of the parts of its tensors is that part of its results."""
    count, wrong = compared(call)
    assert wrong == 0
    assert count or not axes_of(call.definition, call.signature, call.sizes, call.definition.row_axis(call.options))


@pytest.mark.parametrize(
    ("op", "claim"),
    [
        ("softmax", {"columns": "N"}),
        ("layernorm_backward", {"independent": ("R",), "reduced": ()}),
        ("gemm", {"rows": "K"}),
    ],
)
def test_a_false_claim_is_found(op: str, claim: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec that calls an axis independent along which it sums is caught by the test above."""
    call = usual_calls(spec(op))[0]
    monkeypatch.setitem(call.definition.__dict__, "axes", replace(call.definition.axes, **claim))
    assert compared(call)[1]


def test_queries_in_the_middle_of_a_causal_mask_stand_alone() -> None:
    """With the keys up to their own; under "top_left" as the last of so many keys; not where ALiBi counts otherwise."""
    rule = spec("attention").axes.tiling["Sq"]
    sizes = {"Sq": 10, "Sk": 14}
    whole = spec("attention").complete({})
    assert rule(3, 2, sizes, {**whole, "causal": "bottom_right"}, {}) == Tile(
        {"Sq": (3, 2), "Sk": (0, 9)}, {**whole, "causal": "bottom_right"}
    )
    assert rule(3, 2, sizes, {**whole, "causal": "top_left"}, {}) == Tile(
        {"Sq": (3, 2), "Sk": (0, 5)}, {**whole, "causal": "bottom_right"}
    )
    assert rule(3, 2, sizes, {**whole, "causal": "top_left", "alibi": True}, {}) is None
    assert rule(3, 2, sizes, {**whole, "window": (2, 2)}, {}) is None


def test_blocks_stay_together_where_a_dimension_is_a_quotient() -> None:
    """128 columns share a scale, 8 share a word; the last block may be short."""
    call = recipe("gemm_fp8", {"M": 3, "N": 300, "K": 130}, options={"granularity": "block"})
    axes = {axis.symbol: axis for axis in axes_of(call.definition, call.signature, call.sizes, "M")}
    assert axes["N"] == Axis("N", 3, 128)
    kept = cut(call.definition, call.signature, call.sizes, {axes["N"]: torch.tensor([0, 2])})
    assert len(kept.index["N"]) == 128 + 44
    assert kept.index["ceil(N/128)"].tolist() == [0, 2]
