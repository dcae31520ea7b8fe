"""How much of a contract's radius a float32 evaluation uses, and the adversarial numbers to ask it with."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.format import format_named
from assay.golden import evaluate, spec
from assay.golden.arithmetic import Ball, BallArithmetic
from assay.golden.evaluation.call import run
from assay.verify.contract import Contract
from tests.golden.enclosure import several
from tests.golden.float32 import Functions

Tensor = torch.Tensor
Call = tuple[tuple[Tensor, ...], dict[str, Any]]
Kernels = Callable[..., Iterator[tuple[str, Any]]]
Kinds = tuple[str, ...]
SIGNS = (0, 1, -1)
THIRDS = [slice(0, None, 3), *(pytest.param(slice(n, None, 3), marks=pytest.mark.evidence) for n in (1, 2))]
"""What cases of a kind are split into: a usual run takes the first, the others are evidence."""
by_thirds = pytest.mark.parametrize("third", THIRDS, ids=["first", "second", "third"])


@dataclass(frozen=True)
class Use:
    """The share of the radius that one evaluation used, at its worst element; infinite where that is no number."""

    ratio: float
    kernel: str
    result: int
    where: str = ""


def uses(
    op: str,
    tensors: tuple[Tensor, ...],
    options: Mapping[str, Any],
    results: Iterable[tuple[str, Any]],
    *,
    dtype: str = "float32",
    where: str = "",
    contract: Contract | None = None,
) -> list[Use]:
    """For each named result |y - exact| over the contract's radius (the default one's), where that is finite."""
    definition = spec(op)
    model = (contract or Contract()).model(definition, format_named(dtype))
    balls = run(definition, BallArithmetic(model), tensors, options)
    goldens = several(evaluate(op, *tensors, **options))
    found = []
    for name, result in results:
        for place, (y, ball, golden) in enumerate(zip(several(result), balls, goldens, strict=True)):
            assert isinstance(ball, Ball)
            off = ((y.double() - golden.value).abs() - golden.radius).clamp(min=0)
            judged = torch.isfinite(ball.radius) & torch.isfinite(golden.value) & torch.isfinite(golden.radius)
            ratio = torch.where(off == 0, 0.0, off / ball.radius).nan_to_num(nan=math.inf)
            ratio = torch.where(judged, ratio, 0.0)
            found.append(Use(float(ratio.max()) if ratio.numel() else 0.0, name, place, where))
    return found


def worst(found: Iterable[Use]) -> Use:
    return max(found, key=lambda use: use.ratio)


def report(op: str, found: list[Use], record_property: Any) -> None:
    """Assert that the radius held; leave the largest share of it in the report."""
    most = worst(found)
    record_property("share", most.ratio)
    print(f"{op}: {most.ratio:.3f} by {most.kernel}, result {most.result}, {most.where}, of {len(found)} evaluations")
    assert most.ratio <= 1, most


def used_along_rows(op: str, kernels: Kernels, calls: Callable[[str, int], Iterator[Call]], kinds: Kinds) -> list[Use]:
    """Every kernel on every kind of rows of 1, 2 and 33 numbers, its functions off to each side in turn."""
    found: list[Use] = []
    functions = {sign: Functions(sign) for sign in SIGNS}
    for n, kind in ((n, kind) for n in (1, 2, 33) for kind in kinds):
        for tensors, options in calls(kind, n):
            sign = SIGNS[(kinds.index(kind) + n) % 3]
            results = kernels(functions[sign], *tensors, **options)
            found += uses(op, tensors, options, results, where=f"{kind} x {n}, {options}, {sign}")
    return found


def codes(count: int, columns: int, seed: int = 0) -> Tensor:
    """Bytes that are numbers in any format of eight bits."""
    drawn = np.random.default_rng([seed, count, columns]).integers(0, 256, (count, columns))
    drawn[(drawn & 127) == 127] = 0
    return torch.from_numpy(drawn).to(torch.uint8)


def rows(kind: str, count: int, columns: int, seed: int = 0) -> Tensor:
    """``count`` rows of float32 numbers of one kind."""
    rng = np.random.default_rng([seed, count, columns, *kind.encode()])
    normal, place = rng.standard_normal((count, columns)), np.arange(columns)
    made = {
        "normal": lambda: normal,
        "wide": lambda: normal * 20,
        "steep": lambda: normal * 60,
        "ascending": lambda: np.sort(normal * 3, -1),
        "steeply ascending": lambda: place * 0.5 + 0.1 * normal,
        "descending": lambda: -np.sort(-3 * normal, -1),
        "slowly ascending": lambda: place * 1e-3 + 0 * normal,
        "large mean": lambda: normal + 1000,
        "large negative mean": lambda: normal - 3e4,
        "constant": lambda: np.full((count, columns), 100 * normal[0, 0]),
        "ties": lambda: rng.integers(-1, 2, (count, columns)).astype(float),
        "cancelling": lambda: (1 - 2.0 * (place % 2)) * (1 + rng.random((count, columns)) / 64),
        "positive": lambda: rng.random((count, columns)),
        "lognormal": lambda: np.sign(normal) * 2.0 ** (8 * rng.standard_normal((count, columns))),
        "small": lambda: normal * 1e-20,
        "subnormal": lambda: normal * 1e-40,
        "near zero": lambda: normal * 1e-4,
        "huge": lambda: normal * 1e18,
        "nearly overflowing": lambda: normal * 1e37,
        "peaked": lambda: normal + 50 * (rng.random((count, columns)) < 0.1),
        "at the limits of exp": lambda: rng.choice([-104.0, -103.9, -88.7, -87.3, 0.0, 88.7], (count, columns)),
        "zeros": lambda: 0 * normal,
    }[kind]()
    return torch.from_numpy(np.ascontiguousarray(made)).float()


KINDS = (
    "normal", "wide", "steep", "ascending", "steeply ascending", "descending", "slowly ascending", "large mean",
    "large negative mean", "constant", "ties", "cancelling", "positive", "lognormal", "small", "subnormal", "near zero",
    "huge", "nearly overflowing", "peaked", "at the limits of exp", "zeros",
)  # fmt: skip
