"""What is wrong with a kernel that has a reference is told by the reference's own lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from assay.golden.lowering import reference_spec
from assay.verify import examine
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.power import power

ASKED: dict[str, Any] = {"dtype": "float32", "effort": "quick", "every_aspect": False}


def norm(x: Any, w: Any, b: Any) -> Any:
    h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return F.gelu(h * w + b) * 0.7071


def masked_softmax(x: Any) -> Any:
    mask = torch.ones(x.shape[-2], x.shape[-1]).tril().bool()
    return (x * 0.125).masked_fill(~mask, float("-inf")).softmax(-1)


def layer(x: Any, w: Any, b: Any) -> Any:
    return F.relu(F.linear(x, w, b)).sum(-1)


def loss(x: Any, y: Any) -> Any:
    apart = (x - y).abs()
    return torch.where(apart < 1.0, 0.5 * apart * apart, apart - 0.5).mean(-1)


def attention(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v


def running(x: Any, g: Any) -> Any:
    return torch.cumsum(x * torch.sigmoid(g), -1)


def convolved(x: Any, w: Any, b: Any) -> Any:
    return torch.tanh(F.conv1d(x, w, b, padding=1))


def mixed(a: Any, b: Any) -> Any:
    return torch.einsum("tij,tjk->tik", a, b) / (1 + b.abs().amax((-1, -2), keepdim=True))


ROWS, LAYER = "x[T,D], w[D], b[D] -> y[T,D]", "x[T,D], w[N,D], b[N] -> y[T]"
HEADS = "q[B,S,D], k[B,T,D], v[B,T,E] -> y[B,S,E]"
WINDOWS = "x[B,C,L], w[O,C,3], b[O] -> y[B,O,L]"
MATRICES = "a[T,I,J], b[T,J,K] -> y[T,I,K]"


def _rooted(x: Any, count: Callable[[int], int] = lambda n: n) -> Any:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / count(x.shape[-1]) + 1e-6)


def _softmax(x: Any, diagonal: int | None, scale: float = 0.125) -> Any:
    if diagonal is None:
        return (x * scale).softmax(-1)
    kept = torch.arange(x.shape[-1])[None, :] - torch.arange(x.shape[-2])[:, None] <= diagonal
    return torch.where(kept, x * scale, -torch.inf).softmax(-1)


def _attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    return torch.softmax(torch.einsum("bsd,btd->bst", q, k) * scale, -1) @ v


FAULTY: dict[str, tuple[Callable[..., Any], str, Callable[..., Any], str]] = {
    "factor": (norm, ROWS, lambda x, w, b: F.gelu(_rooted(x) * w + b), "the factor 0.7071 is left out (line"),
    "bias": (norm, ROWS, lambda x, w, b: F.gelu(_rooted(x) * w) * 0.7071, "the second term is left out"),
    "tanh": (
        norm, ROWS, lambda x, w, b: F.gelu(_rooted(x) * w + b, approximate="tanh") * 0.7071,
        "it is approximated by tanh",
    ),
    "one less": (
        norm, ROWS, lambda x, w, b: F.gelu(_rooted(x, lambda n: max(n - 1, 1)) * w + b) * 0.7071,
        "the sum is divided by one less",
    ),
    "no mask": (masked_softmax, "x[S,T] -> y[S,T]", lambda x: _softmax(x, None), "the mask is not applied"),
    "diagonal": (masked_softmax, "x[S,T] -> y[S,T]", lambda x: _softmax(x, 1), "one diagonal later"),
    "unscaled": (masked_softmax, "x[S,T] -> y[S,T]", lambda x: _softmax(x, 0, 1.0), "the factor 0.125 is left out"),
    "no relu": (layer, LAYER, lambda x, w, b: F.linear(x, w, b).sum(-1), "relu is left out"),
    "no bias": (layer, LAYER, lambda x, w, b: F.relu(x @ w.T).sum(-1), "the term that is added is left out"),
    "tail": (
        layer, LAYER,
        lambda x, w, b: F.relu(F.linear(x, w, b))[..., : max(w.shape[0] - 1, 1)].sum(-1),
        "the last element is left out",
    ),
    "sum": (
        loss, "x[T,D], y[T,D] -> l[T]", lambda x, y: F.smooth_l1_loss(x, y, reduction="none").sum(-1),
        "the sum is not divided",
    ),
    "one branch": (
        loss, "x[T,D], y[T,D] -> l[T]", lambda x, y: ((x - y).abs() - 0.5).mean(-1),
        "the second is taken everywhere",
    ),
    "scores": (attention, HEADS, lambda q, k, v: _attention(q, k, v, 1.0), "is left out (line"),
    "exclusive": (
        running, "x[T,D], g[T,D] -> y[T,D]", lambda x, g: (x * g.sigmoid()).cumsum(-1) - x * g.sigmoid(),
        "each sum leaves out its own element",
    ),
    "ungated": (running, "x[T,D], g[T,D] -> y[T,D]", lambda x, g: x.cumsum(-1), "the second factor is left out"),
    "mirrored": (
        convolved, WINDOWS, lambda x, w, b: F.conv1d(x, w.flip(-1), b, padding=1).tanh(),
        "the kernel's window is mirrored",
    ),
    "divisor": (mixed, MATRICES, lambda a, b: a @ b, "the divisor is left out"),
}  # fmt: skip


AGAIN = ("unscaled", "no bias", "scores")
"""Faults of a kind that another one has too."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.evidence if name in AGAIN else ()) for name in FAULTY]
)
def test_the_fault_is_named_by_its_line(name: str) -> None:
    """The first entry is the fault that the kernel has, in words of the reference."""
    reference, tensors, kernel, words = FAULTY[name]
    verdict = examine(kernel, reference, tensors=tensors, **ASKED)
    assert verdict.outcome == "FAIL"
    assert verdict.explanations, str(verdict)
    assert words in verdict.explanations[0].description, str(verdict)


def test_a_fault_of_no_line_is_not_put_down_to_one() -> None:
    """A kernel of another function altogether has no known fault."""
    verdict = examine(lambda x, w, b: torch.sin(3 * x) * w - b.cos(), norm, tensors=ROWS, **ASKED)
    assert verdict.outcome == "FAIL"
    assert not verdict.explanations, str(verdict)


def test_faults_have_the_line_of_the_reference() -> None:
    """Every operation of a loop is one place, whatever the number of turns; each fault says its line once."""

    def looped(x: Any) -> Any:
        y = x
        for _ in range(x.shape[-1]):
            y = y * 0.5 + x
        return y

    faults = [
        fault
        for fault in fault_models_of(reference_spec(looped, "x[T,D] -> y[T,D]").qualified_name)
        if fault.definition
    ]
    assert sum("the factor 0.5 is left out" in fault.description for fault in faults) == 1
    assert all("`y = y * 0.5 + x`" in fault.description for fault in faults)


def test_power_is_measured_for_a_reference() -> None:
    """Kernels with each of the reference's faults are caught, and counted by family."""
    report = power(masked_softmax, tensors="x[S,T] -> y[S,T]", dtype="float32", examples=5, families=["mask", "scale"])
    assert len(report.trials) >= 4
    assert all(trial.caught for trial in report.trials), str(report)
