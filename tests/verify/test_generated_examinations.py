"""Generated examinations: whatever kernels, references and strings are, a verdict comes, or an error of one line.

`ASSAY_EXAMINATIONS` sets how many are made, `ASSAY_EXAMINATIONS_FROM` the first seed.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from assay.runtime.errors import AssayError
from assay.verify import Contract, Verdict, examine
from assay.verify.findings import OUTCOMES
from assay.verify.report.html import verdict_page

FIRST = int(os.environ.get("ASSAY_EXAMINATIONS_FROM", "0"))
COUNT = int(os.environ.get("ASSAY_EXAMINATIONS", "6"))

Steps = list[Callable[..., Any]]
UNARY: Steps = [
    torch.exp, torch.sigmoid, torch.relu, torch.tanh, torch.abs, torch.sqrt, torch.log, torch.sign, torch.round,
    torch.nan_to_num, lambda x: x.clamp(-1, 1), lambda x: x * 0.5, lambda x: x + 1, lambda x: -x, lambda x: 1 / x,
    lambda x: x.to(torch.bfloat16).float(), lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.flip(-1),
]  # fmt: skip
BINARY: Steps = [
    lambda x, w: x * w, lambda x, w: x + w, lambda x, w: x - w, lambda x, w: x / w, lambda x, w: torch.maximum(x, w),
    lambda x, w: torch.where(x > w, x, w), lambda x, w: x * w.sum(), lambda x, w: x[..., : w.shape[0]] * w,
]  # fmt: skip
ROWS: Steps = [
    lambda x: torch.softmax(x, -1), lambda x: torch.cumsum(x, -1), lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x / x.norm(dim=-1, keepdim=True), lambda x: x.sort(-1).values, lambda x: torch.log_softmax(x, -1),
    lambda x: x.reshape(x.shape[0], 2, -1).flip(1).reshape(x.shape),
]  # fmt: skip
RESULTS: list[tuple[str, Callable[..., Any]]] = [
    ("y[T,D]", lambda x: x), ("y[T]", lambda x: x.sum(-1)), ("y[T]", lambda x: x.amax(-1)), ("y", lambda x: x.mean(0)),
    ("y[D,T]", lambda x: x.T), ("y[]", lambda x: x.sum()), ("y:f32[T,2]", lambda x: x.float()[:, :2]),
    ("v[T,2], i:i64[T,2]", lambda x: tuple(x.topk(2, -1))), ("i:int64[T]", lambda x: x.argmax(-1)),
]  # fmt: skip
MISSTATED: list[tuple[str, Callable[..., Any]]] = [
    ("y[T,D]", lambda x: x.T), ("y[T,D]", lambda x: None), ("y[T,D]", lambda x: x.tolist()),
    ("y:u8[T,D]", lambda x: x.to(torch.uint8)),
]  # fmt: skip
UNCLEAR = "no verdict, and no line of a user's words"
STRANGE = 0.08  # the share of settings that mean nothing
ADDITIONS = ["[", "]", ",", ":", "->", "=", "bf61", "E", "*", "2", "(", " ", "'", "in(0, 1)", "=sorted", ":i64", "\n"]
CONTRACTS: list[Any] = [
    None, None, None, "torch", "cublas",
    Contract(subnormals="flush"), Contract(nonfinite="unspecified"), Contract(accumulate="bfloat16"),
    Contract(batch_invariant=True), Contract(order="any"), Contract(stages={}), Contract(rounding="toward_zero"),
]  # fmt: skip
OPTIONS: list[Any] = [None, None, None, {}, {"scale": [0.5, 2.0]}, {"scale": 0.5}, {"scael": [1]}, {"scale": []}, [1]]
SHAPES: list[Any] = [
    None,
    {"T": [1, 3]},
    {"D": [4]},
    {"D": range(9)},
    {"D": [2, 8], "T": "D"},
    {"E": [2]},
    {"T": -1},
]
DTYPES: list[Any] = ["bfloat16", "bf16", "f32", "float16", "float64", "e4m3", "int64", "bf61", {"x": "f32"}, None]


class Wrapped(torch.Tensor):
    """A subclass of tensors."""


def as_it_is(y: Any, x: Any) -> Any:
    return y


def last_wrong(y: Any, x: Any) -> Any:
    y = y.clone()
    if y.numel():
        y.view(-1)[-1] += 1
    return y


def raises(y: Any, x: Any) -> Any:
    raise random.choice([ValueError, RuntimeError, KeyError, SystemExit, RecursionError, TypeError])(
        "of the kernel\ntwice"
    )


def contiguous_alone(y: Any, x: Any) -> Any:
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    return y


def changes_its_input(y: Any, x: Any) -> Any:
    x.zero_()
    return y


FAULTS: Steps = [
    as_it_is, as_it_is, as_it_is, last_wrong, raises, contiguous_alone, changes_its_input,
    lambda y, x: y * 1.01, lambda y, x: torch.nan_to_num(y), lambda y, x: None, lambda y, x: y.float(),
    lambda y, x: y[:1], lambda y, x: (y, y), lambda y, x: y.as_subclass(Wrapped), lambda y, x: [1, 2], lambda y, x: "y",
    lambda y, x: y.to_sparse(), lambda y, x: y.expand(2, *y.shape), lambda y, x: torch.empty_like(y),
    lambda y, x: y.cpu().numpy(),
    lambda y, x: y * (1 + 1e-3 * torch.rand(())), lambda y, x: y if x.shape[0] % 3 else y * 2, lambda y, x: x,
    lambda y, x: torch.zeros_like(y), lambda y, x: y.requires_grad_(), lambda y, x: y.to("meta"), lambda y, x: y.half(),
]  # fmt: skip


def question_of(seed: int) -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """Return a kernel, a reference and settings, some of which mean nothing."""
    draw = random.Random(seed)

    def one_of(usual: Any, strange: Any) -> Any:
        return draw.choice(strange) if draw.random() < STRANGE else draw.choice(usual)

    chain = [draw.choice(UNARY + ROWS) for _ in range(draw.randint(0, 3))]
    binary, (declared, result), fault = draw.choice(BINARY), one_of(RESULTS, MISSTATED), draw.choice(FAULTS)

    def reference(x: Any, w: Any, scale: float = 1.0) -> Any:
        y = binary(x.float(), w.float()) * scale
        for step in chain:
            y = step(y)
        y = result(y)
        return y.to(x.dtype) if isinstance(y, torch.Tensor) and y.is_floating_point() else y

    def kernel(x: Any, w: Any, scale: float = 1.0) -> Any:
        return fault(reference(x, w, scale), x)

    tensors = f"x[T,D], w[D]{draw.choice(['', '', '', '=in(0, 1)', '=sorted'])} -> {declared}"
    if draw.random() < STRANGE:
        at = draw.randrange(len(tensors))
        tensors = tensors[:at] + draw.choice(["", *ADDITIONS]) + tensors[at + draw.randint(0, 2) :]
    settings = {
        "tensors": tensors,
        "dtype": one_of(("bfloat16", "bf16", "f32", "float16"), DTYPES),
        "effort": "quick",
        "examples": draw.randint(0, 2),
        "seed": seed,
        "layouts": one_of(
            [("contiguous",), ("contiguous", "sliced"), ("transposed", "far")], ["sliced", ("flat",), ()]
        ),
        "contract": one_of(CONTRACTS, [7, "", "tritom-default", {"accumulate": "float32"}]),
        "options": one_of([None, {}, {"scale": [0.5, 2.0]}], OPTIONS),
        "shapes": one_of([None, {"T": [1, 3]}, {"D": [4]}, {"D": [2, 8]}, {"D": range(9)}], SHAPES),
        "strict": draw.random() < 0.3,
        "shrinking": draw.random() < 0.5,
        "every_aspect": draw.random() < 0.5,
        "budget": draw.choice([0.2, 0.5, 1.0]),
        "refuses": one_of([(), ("contiguous",), {"must be": "D > 2"}], [{"(": ""}, {"x": "Q > 1"}, {"x": "D >"}]),
    }
    return kernel, reference, settings


def check(seed: int) -> str:
    """Make an examination; return its outcome, the class of its error, or `UNCLEAR` with what came."""
    kernel, reference, settings = question_of(seed)
    try:
        verdict = examine(kernel, reference, **settings)
    except AssayError as error:
        words = str(error)
        is_clear = "\n" not in words and "assay's own" not in words
        return type(error).__name__ if is_clear else f"{UNCLEAR}: {seed}: {words}"
    unclear = [line for line in verdict.errors if "assay's own" in line or "\n" in line]
    if unclear or verdict.outcome not in OUTCOMES or "Traceback" in str(verdict):
        return f"{UNCLEAR}: {seed}: {unclear or verdict}"
    assert isinstance(Verdict.from_dict(verdict.as_dict()), Verdict)
    verdict.to_json()
    verdict_page(verdict)
    return verdict.outcome


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
def test_an_examination_ends_in_a_verdict_or_one_line(seed: int) -> None:
    answer = check(seed)
    assert not answer.startswith(UNCLEAR), answer
