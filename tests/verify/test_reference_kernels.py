"""Kernels against references as people write them, masks and whole numbers among them: honest pass, faulty fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay.golden.errors import DefinitionError
from assay.verify import Contract, Verdict, examine

from .examined import fails, passes
from .references import CASES, Case

FAULTY = [(case, fault) for case in CASES for fault in case.faulty]


def asked(case: Case, kernel: Any, **more: Any) -> Verdict:
    settings = {"dtype": case.dtype, "effort": "quick", "shrinking": False, **case.asked, **more}
    return examine(kernel, case.reference, tensors=case.tensors, **settings)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_honest_kernel_is_not_failed(case: Case) -> None:
    verdict = asked(case, case.honest, examples=2)
    assert verdict.outcome in ("PASS", "WARN"), str(verdict)
    assert verdict.outcome == "PASS" or verdict.aspects["special"].status == "broken", str(verdict)


@pytest.mark.parametrize(("case", "fault"), FAULTY, ids=[f"{case.name}-{fault}" for case, fault in FAULTY])
def test_a_faulty_kernel_is_found(case: Case, fault: str) -> None:
    verdict = asked(case, case.faulty[fault], every_aspect=False)
    assert verdict.outcome == ("WARN" if fault in case.warned else "FAIL"), str(verdict)


ASKED: dict[str, Any] = {"dtype": "float32", "effort": "quick", "shrinking": False}


def places(x: Any) -> Any:
    return x.argmax(-1)


def count(x: Any) -> Any:
    return (x * 1.1 > 0.5).sum(-1)


def above(x: Any, mask: Any) -> Any:
    return (x > 0) & mask


def two_largest(x: Any) -> Any:
    return x.topk(2, -1)


ROW, MASKED = "x[R,N] -> y:int64[R]", "x[R,N], mask:bool[R,N] -> y:bool[R,N]"
PAIR = "x[R,N] -> y[R,2], i:int64[R,2]=index(N)"


@pytest.mark.parametrize(
    ("reference", "tensors", "honest", "faulty"),
    [
        (places, ROW, lambda x: x.shape[-1] - 1 - x.flip(-1).argmax(-1), lambda x: x.abs().argmax(-1)),
        (count, ROW, lambda x: (x.double() * 1.1 > 0.5).sum(-1), lambda x: (x * 1.2 > 0.5).sum(-1)),
        (above, MASKED, above, lambda x, mask: (x > 0) | mask),
        (two_largest, PAIR, two_largest, lambda x: tuple(part.flip(-1) for part in x.topk(2, -1))),
    ],
)
def test_masks_and_integers_are_judged(reference: Any, tensors: str, honest: Any, faulty: Any) -> None:
    """Of equal numbers any place is right, and a count may be off where its comparison is within rounding."""
    asked: dict[str, Any] = {"tensors": tensors, "shapes": {"N": [2, 5, 17, 128]}, **ASKED}
    passes(examine(honest, reference, **asked))
    fails(examine(faulty, reference, **asked))


def test_integers_without_a_role_are_asked_for_one() -> None:
    with pytest.raises(DefinitionError, match=r"ids are integers of which nothing is said; expected a role: ids:int64"):
        examine(lambda x, ids: x[ids], lambda x, ids: x[ids], tensors="x[T], ids:int64[N] -> y[N]", **ASKED)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_integers_may_be_any_of_either_sign(dtype: str) -> None:
    """A kernel that takes signed ones for unsigned is found; nothing else of the call has a format of numbers."""
    least = []

    def halved(a: Any) -> Any:
        return a.to(torch.float64).mul(0.5).float()

    def observed(a: Any) -> Any:
        least.append(min(a.flatten().tolist(), default=0))
        return halved(a)

    asked: dict[str, Any] = {"tensors": f"a:{dtype}[M,K]=bits -> y:float32[M,K]", **ASKED}
    passes(examine(observed, halved, **asked))
    assert min(least) == (0 if dtype == "uint8" else -(2 ** (min(torch.iinfo(getattr(torch, dtype)).bits, 32) - 1)))
    fails(examine(lambda a: halved(a.abs()) if dtype != "uint8" else halved(a // 2), halved, **asked))


def test_integers_beyond_those_of_float32_are_rounded_by_a_cast() -> None:
    """Both factors of a product are off by up to 2^-24, which a kernel in float64 leaves out."""

    def square(a: Any) -> Any:
        return a.float() @ a.float().T

    asked: dict[str, Any] = {"tensors": "a:int32[M,K]=bits -> y:float32[M,M]", **ASKED}
    passes(examine(square, square, **asked))
    passes(examine(lambda a: (a.double() @ a.double().T).float(), square, **asked))
    fails(examine(lambda a: (a // 64 * 64).float() @ a.float().T, square, **asked))


def test_a_mask_may_be_an_example() -> None:

    def filled(x: Any, mask: Any) -> Any:
        return x.masked_fill(~mask, 0.0)

    def inputs() -> list[torch.Tensor]:
        return [torch.randn(8, 16), torch.rand(8, 16) > 0.5]

    assert examine(lambda x, mask: torch.where(mask, x, 0.0), filled, inputs=inputs, **ASKED).passed
    assert not examine(lambda x, mask: x, filled, inputs=inputs, **ASKED).passed


def test_both_sides_of_a_step_are_right() -> None:

    def stepped(x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    def multiplied(x: Any) -> Any:
        largest = x.abs().amax(-1, keepdim=True)
        return (x * (127 / largest)).round() * (largest / 127)

    def one_off(x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return ((x / scale).round() + 1) * scale

    asked = {**ASKED, "tensors": "x[T,D] -> y[T,D]", "contract": Contract(nonfinite="unspecified")}
    assert examine(multiplied, stepped, **asked).aspects["numbers"].status == "kept"
    assert examine(one_off, stepped, **asked).outcome == "FAIL"
