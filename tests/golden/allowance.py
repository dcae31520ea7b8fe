"""How much of a contract's radius a float32 evaluation uses, and the adversarial numbers to ask it with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from assay.golden import evaluate, spec
from assay.golden.arithmetic import Ball, BallArithmetic
from assay.golden.run import run, split_keywords
from assay.precision.formats import format_named
from assay.verify.contract import Contract

Tensor = torch.Tensor


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
) -> list[Use]:
    """For each named result |y - exact| over the default contract's radius, where that is finite."""
    definition = spec(op)
    plain, keywords = split_keywords(definition, options)
    model = Contract().model(definition, format_named(dtype))
    balls = _several(run(definition, BallArithmetic(model), tensors, plain, keywords))
    goldens = _several(evaluate(op, *tensors, **options))
    found = []
    for name, result in results:
        for place, (y, ball, golden) in enumerate(zip(_several(result), balls, goldens, strict=True)):
            assert isinstance(ball, Ball)
            off = ((y.double() - golden.value).abs() - golden.radius).clamp(min=0)
            judged = torch.isfinite(ball.radius) & torch.isfinite(golden.value) & torch.isfinite(golden.radius)
            ratio = torch.where(off == 0, 0.0, off / ball.radius).nan_to_num(nan=math.inf)
            ratio = torch.where(judged, ratio, 0.0)
            found.append(Use(float(ratio.max()) if ratio.numel() else 0.0, name, place, where))
    return found


def _several(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def worst(found: Iterable[Use]) -> Use:
    return max(found, key=lambda use: use.ratio)


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
