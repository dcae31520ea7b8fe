"""Backward definitions are the derivatives of their forward ones: by finite differences in Arb, and by mpmath's diff.

For a forward definition f and a cotangent c, let L(t) = sum c f(x + t e). The central difference D(h) is L'(0) up to
h^2 L'''/6 + O(h^4), and D(2h) up to four times that, so that L'(0) lies within |D(2h) - D(h)| of D(h) as soon as h is
small; it is 2^-200 here, and Arb's balls carry what is lost to rounding. That this leaves at least forty digits is
part of what is checked.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from assay.golden import spec, specs
from assay.golden.arithmetic import Arb, Multiprecision
from tests.golden.gradient_pairs import PAIRS, Definition, Pair

STEP = 2.0**-200
DIGITS = 200
DIFFERENCES: dict[int, dict[tuple[int, tuple[int, ...]], Any]] = {}  # of each of PAIRS, shared by all tests


def places(pair: Pair) -> Iterator[tuple[int, tuple[int, ...]]]:
    for which, variable in enumerate(pair.variables):
        yield from ((which, index) for index in np.ndindex(variable.shape))


def moved(xp: Any, pair: Pair, which: int, index: tuple[int, ...], step: Any) -> Any:
    """The loss with one element of one variable moved."""
    variables = [xp.exact(variable) for variable in pair.variables]
    variables[which] = variables[which].copy()
    variables[which][index] = variables[which][index] + step
    return pair.loss(xp, variables)


def difference(xp: Arb, pair: Pair, which: int, index: tuple[int, ...]) -> Any:
    """A ball that holds the derivative."""
    coarse, fine = (
        (moved(xp, pair, which, index, step) - moved(xp, pair, which, index, -step)) / (2 * xp.number(step))
        for step in (2 * STEP, STEP)
    )
    lost = (coarse - fine).abs_upper()
    return fine + xp.flint.arb(0, lost)


def disagreements(pair: Pair, definition: Definition | None = None) -> list[str]:
    """Elements of a backward definition that finite differences of the forward one contradict, or cannot decide."""
    xp, found = Arb(DIGITS), []
    with xp.precision():
        gradients = pair.gradients(xp, definition)
        if id(pair) not in DIFFERENCES:
            DIFFERENCES[id(pair)] = {place: difference(xp, pair, *place) for place in places(pair)}
        for (which, index), enclosure in DIFFERENCES[id(pair)].items():
            gradient = gradients[which][index]
            sharp = (enclosure.rad() + gradient.rad()) * 10**40 < 1 + abs(enclosure)
            if not (sharp and enclosure.overlaps(gradient)):
                found.append(f"variable {which}{list(index)}: {gradient!s:.40}, by differences {enclosure!s:.40}")
    return found


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_is_what_finite_differences_enclose(name: str) -> None:
    """Every element lies in the difference quotient's ball, which is less than 1e-40 wide."""
    assert disagreements(PAIRS[name]) == []


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_is_what_mpmath_finds(name: str) -> None:
    """mpmath's own numerical derivative, in mpmath's numbers, agrees to thirty digits."""
    pair, xp = PAIRS[name], Multiprecision(50)
    gradients = pair.gradients(xp)
    for which, index in places(pair):
        found = xp.context.diff(lambda t, which=which, index=index: moved(xp, pair, which, index, t), 0)
        assert abs(found - gradients[which][index]) <= 1e-30 * (1 + abs(found)), (which, index)


def test_every_backward_op_is_proven() -> None:
    """No backward spec without a pair, nor a result without a variable."""
    assert {pair.backward for pair in PAIRS.values()} == {op for op in specs() if spec(op).outputs.gradient_of}
    for pair in PAIRS.values():
        assert len(spec(pair.backward).signature().returns) == len(pair.variables)


def scaled(which: int, definition: Definition) -> Definition:
    """The definition, one of its results off by 1e-12."""

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = definition(*arguments, **options)
        results = list(found) if isinstance(found, tuple) else [found]
        results[which] = results[which] * (1 + 2.0**-40)
        return tuple(results)

    return wrong


@pytest.mark.parametrize("name", PAIRS)
def test_a_gradient_off_by_a_trifle_is_found(name: str) -> None:
    """Each result of each definition, made 1e-12 too large, is contradicted."""
    definition = spec(PAIRS[name].backward).definition
    for which in range(len(PAIRS[name].variables)):
        assert disagreements(PAIRS[name], scaled(which, definition)), which


WRONG: dict[str, tuple[str, Definition]] = {
    "softmax without its mean": ("softmax", lambda xp, y, dy: y * dy),
    "layernorm without the mean of g": (
        "layernorm",
        lambda xp, x, w, dy, eps: (_norm_without_mean(xp, x, w, dy, eps), *_layernorm(xp, x, w, dy, eps=eps)[1:]),
    ),
    "rmsnorm with layernorm's weight": (
        "rmsnorm",
        lambda xp, x, w, dy, eps: (spec("rmsnorm_backward").definition(xp, x, w, dy, eps=eps)[0], dy.sum(0)),
    ),
    "labels not smoothed": (
        "cross_entropy, smoothed",
        lambda xp, x, t, **o: spec("cross_entropy_backward").definition(xp, x, t, **{**o, "label_smoothing": 0.0}),
    ),
    "a mean over ignored tokens too": (
        "cross_entropy, mean",
        lambda xp, x, t, **o: spec("cross_entropy_backward").definition(xp, x, t, **o) * 2 / 3,
    ),
    "attention without a mask": (
        "attention, last keys",
        lambda xp, *tensors, causal, scale: spec("attention_backward").definition(
            xp, *tensors, causal="none", scale=scale
        ),
    ),
}


def _layernorm(*arguments: Any, **options: Any) -> Any:
    return spec("layernorm_backward").definition(*arguments, **options)


def _norm_without_mean(xp: Any, x: Any, weight: Any, dy: Any, eps: float) -> Any:
    centred, root = xp.standardize(x, eps)
    normalized, grown = centred * root, dy * weight
    return (grown - normalized * xp.mean(grown * normalized)) * root


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gradient_is_found(name: str) -> None:
    """Terms left out, options ignored and masks forgotten are contradicted."""
    pair, definition = WRONG[name]
    assert disagreements(PAIRS[pair], definition)
