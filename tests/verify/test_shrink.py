"""Shrinking: a failure becomes a small one of the same kind, which its repro line shows again in a fresh process."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.golden.registry import spec
from assay.verify import examine
from assay.verify.cases.case import Case, all_contents, edits_in_words
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.examination.shrink import shrink, without_index
from assay.verify.findings import Failure, Findings, broken_by
from assay.verify.report.text import text_report
from tests.zoo import FAULTY

from .examined import failure_of

ROOT = Path(__file__).resolve().parents[2]
ZOO = {entry.name: entry for entry in FAULTY}
NAMED = (
    "softmax_unshifted-float32",
    "logsumexp_keeps_dimension-float32",
    "cross_entropy_fixed_ignore_index-float32",
    "layernorm_default_eps-float32",
    "swiglu_rounds_activation-bfloat16",
    "gemm_int8_short_accumulator",
    "softmax_in_place-float32",
    "gemm_drops_single_row-float32",
    "rope_angle_of_place-float16",
    "gemm_splits_add_to_rounded_output-bfloat16",
    "moe_route_ids_sorted-bfloat16",
    "silu_tail_unwritten-bfloat16",
    "softmax_strides_ignored-bfloat16",
    "gelu_behind_input-float32",
    "attention_nan_swallowed-float32",
)
AGAIN = """
import json, sys
from assay.verify.examination.repro import run_line
failures = [run_line(line).failure for line in sys.stdin.read().splitlines()]
print(json.dumps([failure and failure.kind for failure in failures]))
"""


def test_a_fault_shrinks_and_repeats_in_a_fresh_process() -> None:
    """No dimension is left above 16, and the repro line alone brings the same kind of failure elsewhere."""
    few = {"effort": "quick", "examples": 100, "every_aspect": False}
    verdicts = [examine(ZOO[name].kernel, ZOO[name].spec, **{**few, **ZOO[name].examine}) for name in NAMED]
    failures = [verdict.failure for verdict in verdicts]
    assert all(failures)
    sizes = {name: dict(failure.case.sizes) for name, failure in zip(NAMED, failures, strict=True) if failure}
    assert {name: large for name, large in sizes.items() if max(large.values()) > 16} == {}
    lines = "\n".join(verdict.repro for verdict in verdicts)
    done = subprocess.run(
        [sys.executable, "-P", "-c", AGAIN], input=lines, capture_output=True, text=True, check=True, cwd=ROOT
    )
    seen = dict(zip(NAMED, json.loads(done.stdout), strict=True))
    expected = {name: failure.kind for name, failure in zip(NAMED, failures, strict=True) if failure}
    # A repro line makes one call, without the trials that tell an unwritten output and a layout from wrong numbers.
    expected |= {name: seen[name] for name in NAMED if expected[name] in ("unwritten_output", "layout") and seen[name]}
    assert seen == expected


def test_a_fault_of_the_second_tile_shrinks_in_the_other_dimension() -> None:
    """A softmax that is wrong from 65 columns on needs one row to show it."""
    entry = ZOO["softmax_no_rescale-float32"]
    verdict = examine(entry.kernel, entry.spec, effort="quick", examples=20, **entry.examine)
    assert failure_of(verdict).case.sizes["R"] <= 16


Failing = Callable[[Case], bool]


def shrunk(
    op: str, failing: Failing, *, dtype: str = "float32", settings: Any = None, limits: Any = None, **changes: Any
) -> tuple[Case, list[Case]]:
    """The smallest case for a fault that is a predicate of the case, and all cases that were tried."""
    sampler = Sampler(spec(op), dtype, **(settings or {}))
    case = sampler.case(seeded(0), style="tile")
    case = replace(case, **changes)
    assert failing(case)
    tried: list[Case] = []

    def attempt(case: Case) -> Failure | None:
        tried.append(case)
        return Failure("contract", case, "as planted") if failing(case) else None

    return shrink(Failure("contract", case, "as planted"), attempt, sampler, **(limits or {})).case, tried


def test_sizes_shrink_to_the_smallest_that_fail() -> None:
    case, _ = shrunk("softmax", lambda case: case.sizes["R"] >= 3 and case.sizes["N"] >= 5, sizes={"R": 37, "N": 61})
    assert case.sizes == {"R": 3, "N": 5}


def test_a_fault_of_one_place_is_cut_out_from_both_sides() -> None:
    """Cuts at the front keep the elements: what depends on column 40 alone ends as that one column."""

    def failing(case: Case) -> bool:
        first = case.origin.get("N", 0)
        return first <= 40 < first + case.sizes["N"]

    case, _ = shrunk("softmax", failing, sizes={"R": 8, "N": 64})
    assert case.sizes == {"R": 1, "N": 1}
    assert case.origin["N"] == 40


def test_an_edit_inside_stays_while_both_sides_are_cut() -> None:
    """Listed sizes allow no cut at one side alone that keeps column 16 of 33."""
    case, _ = shrunk(
        "softmax",
        lambda case: bool(all_contents(case)["x"].isinf().any()),
        settings={"shapes": {"N": [1, 8, 33]}},
        sizes={"R": 2, "N": 33},
        edits=(("x", (1, 16), math.inf),),
    )
    assert (case.sizes, case.edits) == ({"R": 1, "N": 1}, (("x", (0, 0), math.inf),))


def test_everything_is_simplified_that_does_not_matter() -> None:
    case, _ = shrunk(
        "swiglu",
        lambda case: True,
        settings={"options": {"limit": [None, 7.0]}},
        protocol="repeat",
        memory="nan",
        layouts={"gate": "strided", "up": "transposed"},
        values={"gate": "patterns", "up": "steep"},
    )
    assert (case.protocol, case.memory, case.options["limit"]) == ("once", "plain", None)
    assert set(case.layouts.values()) == {"contiguous"}
    assert case.values == {"gate": "zeros", "up": "zeros"}


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"protocol": "after_other"}, lambda case: case.protocol == "after_other"),
        ({"memory": "huge"}, lambda case: case.memory == "huge"),
        ({"layouts": {"x": "offset"}}, lambda case: case.layouts["x"] == "offset"),
        ({"values": {"x": "near_overflow"}}, lambda case: case.values["x"] == "near_overflow"),
    ],
    ids=["protocol", "memory", "layout", "distribution"],
)
def test_what_matters_is_kept(changes: dict[str, Any], failing: Failing) -> None:
    case, _ = shrunk("softmax", failing, **changes)
    assert failing(case)
    assert case.sizes == {"R": 1, "N": 1}


def test_elements_are_set_to_zero_but_for_those_that_matter() -> None:
    def failing(case: Case) -> bool:
        row = all_contents(case)["x"][0]
        return len(row) >= 4 and bool(row[1] != 0) and bool(row[3] != 0) and len(row.unique()) > 1

    case, tried = shrunk("softmax", failing, sizes={"R": 6, "N": 30})
    assert case.sizes == {"R": 1, "N": 4}
    assert case.values == {"x": "zeros"}
    assert set(case.edits) == {("x", (0, 1), 1.0), ("x", (0, 3), 1.0)}
    assert len(tried) < 60


def test_what_needs_every_element_is_ones() -> None:
    case, _ = shrunk("softmax", lambda case: bool((all_contents(case)["x"] != 0).all()), sizes={"R": 2, "N": 40})
    assert (case.values, case.edits) == ({"x": "ones"}, ())


def test_what_can_not_be_told_in_few_elements_stays_as_it_was_drawn() -> None:
    def failing(case: Case) -> bool:
        return case.sizes["N"] >= 20 and len(all_contents(case)["x"][0].unique()) >= 20

    case, _ = shrunk("softmax", failing, sizes={"R": 2, "N": 40}, values={"x": "normal"})
    assert case.edits == ()
    assert case.values == {"x": "normal"}


def test_a_number_keeps_the_bits_that_matter() -> None:
    def failing(case: Case) -> bool:
        largest = float(all_contents(case)["x"].max())
        return largest > 2 and math.frexp(largest)[0] != 0.5

    case, _ = shrunk("softmax", failing, sizes={"R": 3, "N": 9}, values={"x": "loud"}, seed=4)
    ((_, index, value),) = case.edits
    assert index == (0, 0)
    assert math.frexp(value)[0] == 0.75


def test_no_row_is_left_that_plays_no_part() -> None:
    def failing(case: Case) -> bool:
        return int((all_contents(case)["x"] != 0).any(-1).sum()) >= 2

    def apart(case: Case) -> bool:
        x = all_contents(case)["x"]
        return failing(case) and bool((x[0] != 0).any()) and (case.edits == () or bool((x[-1] != 0).any()))

    case, _ = shrunk("softmax", apart, sizes={"R": 9, "N": 5})
    assert case.sizes == {"R": 2, "N": 1}
    spread = replace(case, sizes={"R": 6, "N": 2}, edits=(("x", (1, 0), 1.0), ("x", (4, 0), 2.0)))
    assert without_index(spread, "R", 4) is None
    closer = without_index(spread, "R", 2)
    assert closer.sizes == {"R": 5, "N": 2}
    assert closer.edits == (("x", (1, 0), 1.0), ("x", (3, 0), 2.0))


def test_a_case_is_told_in_a_line_that_fits() -> None:
    """Neighbours that are equal are one place, many are counted, and options at their defaults are left out."""
    row = tuple(("q", (0, 0, 0, place), 0.5) for place in range(90))
    case = Sampler(spec("attention"), "bfloat16").case(seeded(0))
    case = replace(case, edits=(*row, ("q", (0, 0, 1, 0), math.nan)))
    assert edits_in_words(case.edits) == ["q[0, 0, 0, 0:90] = 0.5", "q[0, 0, 1, 0] = nan"]
    scattered = tuple(("q", (0, 0, 0, place), 0.5) for place in range(0, 90, 2))
    assert edits_in_words(scattered)[-1] == "41 more elements"
    assert "softcap" not in str(case)
    failure = Failure("contract", case, "as planted", "out", (0, 0, 0, 0))
    report = text_report(Findings("FAIL", "k", "attention", "bfloat16", "", aspects=broken_by(failure)))
    lines = report[report.index("  case ") :].partition("  repeat")[0].splitlines()
    assert max(map(len, lines)) <= 100
    assert "".join(lines).count("q[0, 0, 0, 0:90] = 0.5") == 1


def test_another_kind_of_failure_is_not_followed() -> None:
    case = Sampler(spec("softmax"), "float32").case(seeded(0), style="tile")
    found = Failure("contract", case, "as planted")
    assert shrink(found, lambda other: Failure("crash", other, ""), Sampler(spec("softmax"), "float32")) is found


def test_what_fails_no_more_stays_as_it_was() -> None:
    first: list[Case] = []
    case, tried = shrunk("softmax", lambda case: first.append(case) or case == first[0])
    assert case == first[0]
    assert len(tried) > 5


@pytest.mark.parametrize(
    ("op", "options", "multiple", "of"),
    [
        ("gemm_int4", {"packing": ["plain"]}, "K", "g"),
        ("gemm_int4", {"packing": ["gptq"]}, "K", "g"),
        ("attention", {}, "H", "Hkv"),
    ],
)
def test_every_case_on_the_way_is_one_that_the_op_has(op: str, options: Any, multiple: str, of: str) -> None:
    case, tried = shrunk(op, lambda case: True, dtype="bfloat16", settings={"options": options})
    for other in (*tried, case):
        assert other.sizes[multiple] % other.sizes[of] == 0
        assert all(size >= 1 for tensor in other.signature.tensors for size in other.shape(tensor))
    assert case.sizes[multiple] == case.sizes[of]


def test_only_sizes_that_the_caller_gave_are_tried() -> None:
    case, tried = shrunk(
        "softmax", lambda case: True, settings={"shapes": {"N": [24, 40, 64]}}, sizes={"R": 20, "N": 64}
    )
    assert case.sizes == {"R": 1, "N": 24}
    assert {other.sizes["N"] for other in tried} <= {24, 40, 64}


def test_shrinking_ends_in_time() -> None:
    _, tried = shrunk("softmax", lambda case: True, sizes={"R": 60, "N": 60}, limits={"trials": 3})
    assert len(tried) == 3
    _, tried = shrunk("softmax", lambda case: True, sizes={"R": 60, "N": 60}, limits={"seconds": 0.0})
    assert len(tried) <= 1


def logs(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    return x * torch.log(-decay)


def logs_of_large(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Wrong from -3 down."""
    return x * torch.log(-decay + 0.125 * (decay < -3))


def shares(w: torch.Tensor) -> torch.Tensor:
    return w * (1 + w.sum(-1, keepdim=True))


def shares_of_few(w: torch.Tensor) -> torch.Tensor:
    """Wrong where a share is more than a half."""
    return w * (2 + 0.25 * (w > 0.5).any(-1, keepdim=True))


@pytest.mark.parametrize(
    ("kernel", "reference", "tensors"),
    [
        (logs_of_large, logs, "x[T,D], decay[D]=in(-inf, 0) -> y[T,D]"),
        (shares_of_few, shares, "w[T,E]=simplex, E=2*G -> y"),
    ],
    ids=["interval", "simplex"],
)
def test_every_case_and_every_step_of_shrinking_stays_in_the_domain(
    kernel: Callable[..., Any], reference: Callable[..., Any], tensors: str
) -> None:
    calls: list[torch.Tensor] = []

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        calls.append(inputs[-1].detach().clone().double())
        return kernel(*inputs)

    few = {"effort": "quick", "examples": 0, "every_aspect": False, "dtype": "float32"}
    verdict = examine(watched, reference, tensors=tensors, **few)
    case = failure_of(verdict).case
    assert max(case.sizes.values()) <= 4
    assert len(calls) > 20
    for last in calls:
        if "simplex" in tensors:
            assert bool((last >= 0).all())
            assert bool((last.sum(-1) == 1).all())
        else:
            assert bool((last < 0).all())
            assert bool(torch.isfinite(last).all())
    if "interval" in tensors or "in(" in tensors:
        assert [name for name, _, _ in case.edits] in ([], ["decay"])
