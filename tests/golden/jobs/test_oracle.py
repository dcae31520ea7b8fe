"""The oracle: parts of a record are cut where results are independent, and any wrong element of them is found."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.golden import specs
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.jobs import oracle
from assay.golden.registry import Spec, spec
from assay.golden.store import make_record


def smallest_cut(op: Spec) -> Recipe:
    signature = op.signature()
    for size in (9, 30, 100, 300, 1000):
        sizes: dict[str, int] = {}
        for place, symbol in enumerate(sorted(signature.symbols, key=lambda name: (name in op.sizes.multiples, name))):
            step, allowed = op.step(signature, symbol, sizes), op.sizes.allowed.get(symbol)
            sizes[symbol] = min(allowed, key=lambda n: abs(n - size)) if allowed else -(-(size + place) // step) * step
        case = recipe(op.name, sizes)
        if oracle.cut_of(op, signature, sizes, case.options, random.Random(0)):
            return case
    raise AssertionError(f"{op.name} is never cut")


LISTED: tuple[Recipe, ...] = (
    recipe("softmax", {"R": 9, "N": 700}),
    recipe("rope", {"B": 3, "S": 20, "H": 9, "D": 16}),
    recipe("gemm", {"M": 7, "N": 40, "K": 33}),
    *(
        recipe("gemm_fp8", {"M": 7, "N": 300, "K": 130}, options={"granularity": each})
        for each in ("tensor", "row", "block")
    ),
    *(
        recipe("gemm_int4", {"M": 7, "N": 40, "K": 64, "g": 32}, "bfloat16", options={"packing": each})
        for each in ("plain", "awq", "gptq")
    ),
    *(
        recipe(
            "attention",
            {"B": 2, "H": 6, "Hkv": 3, "Sq": 9, "Sk": 12, "D": 8, "Dv": 5},
            options={"causal": causal, "window": window, "alibi": alibi, "sinks": alibi, "return_lse": alibi},
        )
        for causal in ("none", "bottom_right", "top_left")
        for window in (None, (3, 1))
        for alibi in (False, True)
    ),
    recipe("attention_decode", {"B": 3, "H": 6, "Hkv": 3, "D": 8, "P": 30, "page": 4, "max_pages": 7}),
    recipe("moe_route", {"T": 70, "E": 70}, options={"top_k": 4}),
    recipe("moe", {"T": 9, "D": 30, "E": 4, "F": 30, "k": 2}),
    recipe("softmax_backward", {"R": 9, "N": 700}),
    recipe("quantize_fp8", {"R": 9, "N": 700}),
    recipe("quantize_int4", {"R": 9, "N": 700}),
    recipe("cross_entropy_backward", {"T": 9, "V": 700}, options={"reduction": "none"}),
    recipe("all_reduce", {"R": 9, "N": 700}),
    recipe("merge_states", {"T": 20, "H": 20, "D": 16}),
    recipe("attention_varlen", {"B": 3, "Tq": 9, "Tk": 12, "H": 6, "Hkv": 3, "D": 8}),
    recipe("attention_backward", {"B": 2, "H": 6, "Hkv": 3, "Sq": 9, "Sk": 12, "D": 8, "Dv": 5}),
    *(recipe(op, {"R": 9, "N": 700}, values="positive") for op in specs() if spec(op).axes.elementwise),
    *(recipe("gelu", {"R": 9, "N": 700}, options={"approximate": each}) for each in ("none", "tanh")),
)
CUT = [op for op in map(spec, specs()) if op.axes.columns or op.axes.independent or op.axes.groups or op.axes.tiling]
"""The specs that say of more than their rows that results are independent."""
CASES = (*LISTED, *(smallest_cut(op) for op in CUT if op.name not in {case.spec for case in LISTED}))


def cut_of(case: Recipe, seed: int) -> oracle.Cut:
    return oracle.cut_of(case.definition, case.signature, case.sizes, case.options, random.Random(seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}"[:60])
def test_what_is_cut_is_independent(case: Recipe) -> None:
    values = oracle.inputs_of(case)
    whole, cuts = goldens(case, values), [cut_of(case, seed) for seed in range(6)]
    assert cuts[0], "too small a case to be cut"
    for cut in cuts:
        slices = {tensor.name: oracle.slices_of(tensor.dims, case.sizes, cut) for tensor in case.signature.tensors}
        part = goldens(case, {name: values[name][taken] for name, taken in slices.items()})
        compared = 0
        for returned, all_of_it, some in zip(case.signature.returns, whole, part, strict=True):
            if all(group.keys() & set(returned.dims) for group in cut):
                taken = oracle.slices_of(returned.dims, case.sizes, cut)
                off = (all_of_it.value[taken] - some.value).abs().double()
                assert bool((off <= all_of_it.radius[taken] + some.radius).all())
                compared += 1
        assert compared


def goldens(case: Recipe, values: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    keywords = {tensor.name: values[tensor.name] for tensor in case.signature.tensors if tensor.keyword}
    tensors = [values[tensor.name] for tensor in case.signature.tensors if not tensor.keyword]
    return tuple(map(golden_of, run(case.definition, BallArithmetic(), tensors, {**case.options, **keywords})))


def test_a_cut_is_small_and_from_anywhere() -> None:
    case = recipe("gemm_fp8", {"M": 7, "N": 300, "K": 130}, options={"granularity": "block"})
    cuts = [{symbol: place for group in cut_of(case, seed) for symbol, place in group.items()} for seed in range(50)]
    assert {count for cut in cuts for _, count in cut.values()} == {1}
    assert {cut["N"][0] for cut in cuts} == {0, 128, 256}
    assert {cut["M"][0] for cut in cuts} == set(range(7))
    attention = next(case for case in CASES if case.spec == "attention")
    heads = [cut_of(attention, seed) for seed in range(30)]
    assert {group["H"][0] - 2 * group["Hkv"][0] for cut in heads for group in cut if "H" in group} == {0}


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
