"""The oracle: a record, or a part of a large one, is derived again, and any wrong element of it is found."""

import random
from dataclasses import replace

import pytest

from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.jobs import oracle
from assay.golden.store import make_record

LARGE = (
    recipe("softmax", {"R": 9, "N": 700}),
    recipe("softmax_backward", {"R": 9, "N": 700}),
    recipe("exp", {"R": 9, "N": 700}),
    recipe("gemm_fp8", {"M": 7, "N": 300, "K": 130}, options={"granularity": "block"}),
    recipe("gemm_int4", {"M": 7, "N": 40, "K": 64, "g": 32}, "bfloat16", options={"packing": "awq"}),
    *(
        recipe(
            "attention",
            {"B": 2, "H": 6, "Hkv": 3, "Sq": 9, "Sk": 12, "D": 8, "Dv": 5},
            options={"causal": causal, "window": window, "alibi": alibi, "sinks": alibi, "return_lse": alibi},
        )
        for causal, window, alibi in (("none", (3, 1), False), ("bottom_right", None, True), ("top_left", None, False))
    ),
    recipe("attention_decode", {"B": 3, "H": 6, "Hkv": 3, "D": 8, "P": 30, "page": 4, "max_pages": 7}),
    recipe("attention_varlen", {"B": 3, "Tq": 9, "Tk": 12, "H": 6, "Hkv": 3, "D": 8}),
    recipe("attention_backward", {"B": 2, "H": 6, "Hkv": 3, "Sq": 9, "Sk": 12, "D": 8, "Dv": 5}),
    recipe("moe", {"T": 9, "D": 30, "E": 4, "F": 30, "k": 2}),
    recipe("quantize_int4", {"R": 9, "N": 700}),
)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: f"{case}"[:60])
def test_a_part_of_a_large_record_is_derived(case: Recipe) -> None:
    """Whatever is cut: the part's elements, fewer than all, are within the stored radii, and a change is seen."""
    record = make_record(case)
    derived = oracle.derive(record)
    assert derived.fault == ""
    assert 0 < derived.elements < sum(golden.value.numel() for golden in record.goldens)
    first = record.goldens[0]
    changed = replace(first, value=first.value + 2 * first.radius + 1 + first.value.abs())
    assert oracle.derive(replace(record, goldens=(changed, *record.goldens[1:]))).fault


def test_a_part_is_small_and_from_anywhere() -> None:
    case = recipe("gemm_fp8", {"M": 7, "N": 300, "K": 130}, options={"granularity": "block"})
    values = case.named()
    firsts = [oracle.part_of(case, values, random.Random(seed))[0].index for seed in range(50)]
    assert {len(index["M"]) for index in firsts} == {1}
    assert {int(index["M"][0]) for index in firsts} == set(range(7))
    assert {int(index["N"][0]) for index in firsts} == {0, 128, 256}


@pytest.mark.parametrize(
    "case",
    [
        recipe("softmax", {"R": 2, "N": 9}),
        recipe("gemm", {"M": 9, "N": 40, "K": 33}),
        recipe("softmax", {"R": 2, "N": 4}, values="above"),
        recipe("moe_route", {"T": 3, "E": 6}),
    ],
    ids=str,
)
@pytest.mark.parametrize("digits", [None, 30])
def test_a_record_is_derived_and_a_changed_one_contradicted(case: Recipe, digits: int | None) -> None:
    record = make_record(case, digits)
    derived = oracle.derive(record)
    assert derived.fault == ""
    assert derived.elements > 0
    first = record.goldens[0]
    changed = replace(first, value=first.value + 2 * first.radius + 1e-9 * first.value.abs())
    assert oracle.derive(replace(record, goldens=(changed, *record.goldens[1:]))).fault


def test_a_record_too_large_is_said_to_be() -> None:
    record = make_record(recipe("moe", {"T": 1, "D": 512, "E": 4, "F": 256, "k": 2}))
    assert oracle.derive(record) == oracle.Derived(0)
