"""Aspects: each fault is put down to its own, hides no other, and warns or fails as the contract says."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.cli.repro import repeat
from assay.verify import Contract, examine
from assay.verify.examination.aspects import attributed_to
from assay.verify.examination.phases import ordinary_cases
from assay.verify.examination.plan import make_plan
from assay.verify.findings import ASPECTS
from assay.verify.settings import Settings
from assay.verify.verdict import Verdict

from .examined import fails, quick

SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "effort": "quick", "examples": 10}


def honest(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def drops_nan(x: Tensor) -> Tensor:
    return honest(torch.nan_to_num(x.float(), nan=0.0, posinf=torch.inf, neginf=-torch.inf).to(x.dtype))


def without_tail(x: Tensor) -> Tensor:
    """The last column of rows that aren't whole tiles is zero."""
    y = honest(x)
    if x.shape[1] > 16 and x.shape[1] % 16:
        y[:, -1] = 0
    return y


def unshifted(x: Tensor) -> Tensor:
    """The maximum isn't subtracted."""
    e = x.float().exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def changes_input(x: Tensor) -> Tensor:
    """The input is zero after the call."""
    y = honest(x)
    x.zero_()
    return y


def three_faults(x: Tensor) -> Tensor:
    """A wrong tail, dropped NaN, a changed input."""
    y = without_tail(torch.nan_to_num(x, nan=0.0))
    x.zero_()
    return y


def hangs_at_nan(x: Tensor) -> Tensor:
    while bool(x.isnan().any()):
        pass
    return honest(x)


def examined(kernel: Callable[[Tensor], Tensor], **settings: object) -> Verdict:
    return examine(kernel, "softmax", **SETTINGS | settings)


def test_an_honest_kernel_keeps_every_aspect() -> None:
    verdict = examined(honest)
    assert verdict.outcome == "PASS", str(verdict)
    statuses = {name: aspect.status for name, aspect in verdict.aspects.items()}
    expected = dict.fromkeys(ASPECTS, "kept")
    assert statuses | {"conduct": "kept"} == expected, str(verdict)


def too_large(x: Tensor) -> Tensor:
    return (honest(x) * 1.02).to(x.dtype)


@pytest.mark.parametrize(
    ("kernel", "aspects"),
    [
        (without_tail, {"shapes"}),
        (changes_input, {"memory"}),
        (three_faults, {"shapes", "special", "memory"}),
        (too_large, {"numbers"}),
        (unshifted, {"range", "special"}),
    ],
)
def test_a_fault_is_put_down_to_its_aspect(kernel: Callable[[Tensor], Tensor], aspects: set[str]) -> None:
    verdict = fails(examined(kernel))
    assert set(verdict.broken) == aspects, str(verdict)
    for name, aspect in verdict.broken.items():
        assert aspect.failure.aspect == name
        assert aspect.repro.startswith("assay repro ")
    if kernel is too_large:  # where all numbers are wrong nothing is said of layouts
        layouts = verdict.aspects["layouts"]
        assert (layouts.status, layouts.note) == ("not tried", "hidden by numbers")


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [({}, "WARN"), ({"strict": True}, "FAIL"), ({"contract": Contract(nonfinite="ieee")}, "FAIL")],
    ids=["default", "strict", "named"],
)
@pytest.mark.parametrize("every", [True, False])
def test_special_values_warn_unless_promised(settings: dict[str, object], outcome: str, every: bool) -> None:
    verdict = examined(drops_nan, every_aspect=every, shrinking=False, **settings)
    assert verdict.outcome == outcome, str(verdict)
    assert verdict.passed is (outcome == "WARN")
    assert set(verdict.broken) == {"special"}


def test_a_hang_is_no_warning() -> None:
    fails(examined(hangs_at_nan, timeout=0.5, shrinking=False))


def flushes(x: Tensor) -> Tensor:
    """Subnormal results are zero."""
    y = torch.nn.functional.silu(x)
    return torch.where(y.abs() < torch.finfo(x.dtype).tiny, 0, y)


@pytest.mark.parametrize(
    ("kernel", "op", "aspect", "words"),
    [
        (drops_nan, "softmax", "special", "; Contract(nonfinite='unspecified') would admit this case"),
        (flushes, "silu", "subnormals", "; Contract(subnormals='flush') would admit this case"),
        (unshifted, "softmax", "range", ""),
    ],
)
def test_the_field_that_would_admit_it_is_named(kernel: Any, op: str, aspect: str, words: str) -> None:
    """Of NaN at an infinity and of subnormals, for all cases that fail; nothing admits a NaN of ordinary numbers."""
    verdict = examine(kernel, op, **SETTINGS | {"dtype": "float32"})
    failure = verdict.aspects[aspect].failure
    message, counted, others = failure.message.partition(", and ")
    assert message.endswith(words or "of what the contract allows"), failure.message
    assert bool(counted) == bool(words)
    if counted:
        admitted, failing = map(int, re.findall(r"\d+", others))
        assert admitted == failing > 0
        assert others.endswith(" others that fail")


def test_of_how_many_failing_cases_a_field_holds_is_counted() -> None:
    """A flush would admit the smallest case; not those in which normal results beside the least are wrong too."""
    least = torch.finfo(torch.float16).tiny

    def kernel(x: Tensor) -> Tensor:
        y = flushes(x.float()).to(x.dtype)
        y = torch.where(y.abs() < least, torch.zeros_like(y), y)
        return torch.where((y.abs() > 1.5 * least) & (y.abs() < 2 * least) & (x.numel() > 8), 1.5 * y, y)

    failure = examine(kernel, "silu", **SETTINGS | {"dtype": "float16"}).aspects["subnormals"].failure
    found = re.search(
        r"Contract\(subnormals='flush'\) would admit this case, and (\d+) of (\d+) others", failure.message
    )
    assert int(found[1]) < int(found[2])


def test_a_subnormal_on_the_way_to_an_ordinary_number_is_a_matter_of_subnormals() -> None:
    """A sigmoid of -88 that is flushed makes zeros of ordinary products: a warning, hiding no range."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)

    def flushed(gate: Tensor, up: Tensor) -> Tensor:
        sigmoid = torch.sigmoid(gate.float())
        return (gate.float() * torch.where(sigmoid < 2.0**-126, 0.0, sigmoid) * up.float()).to(gate.dtype)

    def halved(gate: Tensor, up: Tensor) -> Tensor:
        y = swiglu(gate, up)
        return torch.where(gate.float() < -80, y / 2, y)

    found = quick(flushed, "swiglu", "bfloat16")
    assert (found.outcome, found.aspects["subnormals"].status) == ("WARN", "broken")
    assert found.aspects["range"].status == "kept"
    fails(quick(flushed, "swiglu", "bfloat16", strict=True))
    fails(quick(halved, "swiglu", "bfloat16"))


def test_a_sigmoid_whose_exponential_overflows_may_be_zero() -> None:
    """1 / (1 + exp(96)) is zero in float32, also where gate times up overflows: either order of factors gives zero."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return (gate.float() / (1 + torch.exp(-gate.float())) * up.float()).to(gate.dtype)

    assert quick(swiglu, "swiglu", "bfloat16").aspects["subnormals"].status == "kept"


def test_what_no_flush_explains_is_no_warning() -> None:
    def halved(x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        return y / 2 if bool(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).any()) else y

    fails(quick(halved))


def test_what_does_not_fail_again_is_a_matter_of_determinism() -> None:
    """A kernel that errs at every thirty-first call is no kernel that can't count rows or bytes."""
    calls = 0

    def rarely_wrong(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = honest(x)
        if calls % 31 == 0:
            y[-1:] *= 2
        return y

    verdict = examine(rarely_wrong, "softmax", **SETTINGS)
    assert set(verdict.broken) == {"determinism"}
    assert "tried again, the same case is right" in str(verdict)


@pytest.mark.parametrize(
    ("kernel", "settings", "outcome", "aspect"),
    [
        (drops_nan, {}, "WARN", "special"),
        (drops_nan, {"strict": True}, "FAIL", "special"),
        (without_tail, {}, "FAIL", "shapes"),
    ],
)
def test_a_repro_line_repeats_the_aspect_and_the_outcome(
    kernel: Callable[[Tensor], Tensor], settings: dict[str, Any], outcome: str, aspect: str
) -> None:
    verdict = examine(kernel, "softmax", **SETTINGS, **settings)
    again = repeat((verdict.repro, ""), lambda *_, **__: None)
    assert (verdict.outcome, again.outcome) == (outcome, outcome)
    assert set(again.broken) == {aspect}


def wrong_when_long(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan) if x.shape[1] > 1000 else honest(x)


@pytest.mark.parametrize(("kernel", "aspect"), [(unshifted, "range"), (wrong_when_long, "shapes")])
def test_overflow_in_long_rows_of_growing_numbers_is_no_matter_of_shapes(
    kernel: Callable[[Tensor], Tensor], aspect: str
) -> None:
    """Rows that ascend to 448 overflow where they are long; a fault of long rows shows on ordinary numbers too."""
    plan = make_plan(kernel, Settings("softmax", dtype="bfloat16"))
    ordinary = next(ordinary_cases(plan.sampler, "tile"))
    case = replace(ordinary, sizes={"R": 1, "N": 3584}, values={"x": "ascending"})
    failure = plan.harness.try_case(case).failure
    assert failure is not None
    assert attributed_to(failure, lambda case: plan.harness.try_case(case).failure, plan.sampler) == aspect
