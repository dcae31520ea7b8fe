"""Deliberate refusals are listed, and no crash; who calls a kernel with arguments that it doesn't take is told so."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.verify import Verdict, examine
from assay.verify.errors import SettingError
from assay.verify.settings import Settings

from .examined import failure_of, first, quick

WIDE = {"too wide": "N * itemsize > 256"}


def narrow(x: Tensor) -> Tensor:
    """Rows of 256 bytes at most."""
    if x.shape[1] * x.element_size() > 256:
        raise RuntimeError(f"rows of {x.shape[1]} are too wide")
    return torch.softmax(x.float(), -1).to(x.dtype)


def nowhere(x: Tensor) -> Tensor:
    raise NotImplementedError("too wide")


def by_accident(x: Tensor) -> Tensor:
    """A crash that has the words of a refusal, where none is documented."""
    if x.shape[0] > 1:
        raise ValueError("too wide")
    return narrow(x)


def verdict_of(kernel: Any, **settings: Any) -> Verdict:
    return quick(kernel, **{"examples": 4, "shapes": {"N": range(1, 260)}, **settings})


@pytest.mark.parametrize("isolate", [False, True])
def test_a_documented_refusal_is_listed(isolate: bool) -> None:
    """The kernel passes, the verdict counts what it refused, and without the documentation it fails."""
    verdict = verdict_of(narrow, refuses=WIDE, isolate=isolate)
    assert verdict.outcome == "PASS", str(verdict)
    assert list(verdict.refused) == ["RuntimeError 'too wide' where N * itemsize > 256"]
    assert sum(verdict.refused.values()) > 1
    assert "refused" in str(verdict)
    assert Verdict.from_dict(verdict.as_dict()).refused == verdict.refused
    if not isolate:
        assert verdict_of(narrow).outcome == "FAIL"


def test_only_what_is_documented_is_a_refusal() -> None:
    for kernel, refuses in ((by_accident, WIDE), (narrow, {"too narrow": ""}), (narrow, {"too wide": "N > 200"})):
        verdict = verdict_of(kernel, refuses=refuses)
        assert verdict.failure is not None
        assert verdict.failure.kind == "crash"


def test_who_refuses_everything_does_not_pass() -> None:
    assert verdict_of(nowhere, refuses=["too wide"]).outcome == "VACUOUS"
    mostly = verdict_of(narrow, refuses="too wide", shapes={"N": range(60, 260)})
    assert mostly.outcome == "MISTRUSTED"
    assert "cases were refused" in mostly.note


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ({"too wide": "M > 3"}, "unknown dimension 'M'"),
        ({"too wide": "N >"}, "expected a condition on sizes"),
        ({"too wide": "N.real > 3"}, "expected comparisons of sizes"),
        ({"too (wide": ""}, "expected a regular expression"),
    ],
)
def test_a_refusal_that_cannot_be_is_one_clear_line(refuses: dict[str, str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Settings("softmax", dtype="float32", refuses=refuses)


def test_refusals_are_settings() -> None:
    settings = Settings("softmax", dtype="float32", refuses=["too wide"])  # type: ignore[arg-type]
    assert settings.refuses == {"too wide": ""}
    assert Settings.from_table(settings.as_table()) == settings


def rms(x: Tensor, w: Tensor) -> Tensor:
    """An adapter that lacks a listed keyword."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def test_a_wrong_signature_is_told_with_the_call() -> None:
    with pytest.raises(SettingError, match=r"called as f\(x, weight, eps=1e-06\), but it takes \(x: .*'eps'"):
        examine(rms, "rmsnorm", dtype="float32", options={"eps": [1e-6]})
    with pytest.raises(SettingError, match=r"called as f\(x\), but it takes \(x: .*missing a required argument: 'w'"):
        examine(rms, "softmax", dtype="float32")


def test_a_type_error_inside_names_the_call_too() -> None:
    """An adapter that takes anything hands on what the kernel doesn't take."""
    failure = failure_of(
        first(lambda *tensors, **options: rms(*tensors, **options), "rmsnorm", options={"eps": [1e-6]})
    )
    assert "the kernel is called as f(x, weight, eps=1e-06)" in failure.message
