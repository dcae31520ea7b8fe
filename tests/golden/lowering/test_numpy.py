"""A NumPy function as a function of torch tensors gives what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.golden.errors import MissingOperation
from assay.golden.lowering.numpy_arrays import from_numpy


def _shifted(x: Any) -> Any:
    moved = np.zeros_like(x)
    moved[:, 1:] = x[:, :-1]
    return moved


def _recurrence(x: Any) -> Any:
    state, rows = np.zeros_like(x[0]), []
    for row in x:
        state = 0.5 * state + row
        rows.append(state)
    return np.stack(rows)


def _softmax(x: Any) -> Any:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _accumulated(x: Any) -> Any:
    total = np.zeros_like(x[0])
    alias = total
    for row in x:
        total += row
        total *= 0.5
    return alias - 1


def _in_parts(x: Any) -> Any:
    y = x.copy()
    y[:, 1:] += x[:, :-1]
    y[0] **= 2
    first = y[1]
    first -= x[2]
    return y


def _into_others(x: Any) -> Any:
    y, z = np.empty_like(x), np.zeros_like(x)
    np.exp(x, out=y)
    np.multiply(y, y, out=y)
    np.add(y, 1.0, y)
    np.sqrt(y, out=z, where=x > 0)
    np.add.reduce(x, axis=0, out=z[0])
    np.cumsum(x, axis=1, out=y)
    x.max(axis=1, out=y[:, 3])
    np.add(z, y[::-1], out=y)
    return y


def _narrowed(x: Any) -> Any:
    y = np.zeros_like(x, dtype=np.float32)
    y += x
    return y.astype(np.float64)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": _softmax,
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "log-sum-exp": lambda x: np.logaddexp(x, 0.0) + np.log1p(np.exp(x)),
    "products": lambda x: np.einsum("ij,kj->ik", x, x) + x @ x.T + np.dot(x, x.T),
    "moments": lambda x: np.mean(x, axis=0) + np.var(x) + np.std(x) + np.linalg.norm(x),
    "reductions": lambda x: x.sum() + np.add.reduce(x, axis=0) + sum(row for row in x),
    "masks": lambda x: np.where(x > 0, x, 0.0) + np.clip(x, -0.5, 0.5) + np.maximum(x, 0) + np.tril(x),
    "shapes": lambda x: np.pad(np.concatenate([x, np.swapaxes(x.T, 0, 1)], axis=1), ((0, 0), (1, 1))),
    "choices": lambda x: np.take_along_axis(np.sort(x, axis=-1), np.argmax(x, axis=-1)[:, None], axis=-1),
    "running": lambda x: np.cumsum(x, axis=1)[np.array([0, 2]), 1:3],
    "constants": lambda x: x * np.arange(8.0) + np.float64(2.5),
    "in place": _shifted,
    "loop": _recurrence,
    "added in place": _accumulated,
    "parts in place": _in_parts,
    "written to others": _into_others,
    "written to fewer bits": _narrowed,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gives_what_numpy_gives(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 8))
    got = from_numpy(FUNCTIONS[name])(torch.tensor(x))
    np.testing.assert_allclose(got.numpy(), FUNCTIONS[name](x), rtol=1e-12, atol=1e-14)


def test_what_leaves_the_protocol_is_refused() -> None:
    with pytest.raises(MissingOperation, match="own functions alone"):
        from_numpy(lambda x: np.asarray(x) + 1)(torch.ones(2))


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "an array of NumPy's own": (lambda x: np.add(x, 1, out=np.zeros(2)), MissingOperation, r"zeros_like\(x\)"),
    "its reduction": (lambda x: np.sum(x, axis=0, out=np.zeros(())), MissingOperation, r"y = y \+ x"),
    "a method's": (lambda x: x.sum(axis=0, out=np.zeros(())), MissingOperation, r"y = y \+ x"),
    "whole numbers": (lambda x: np.exp(x, out=np.zeros_like(x, dtype=np.int64)), TypeError, "cannot cast"),
    "fewer places": (lambda x: np.add(x, 1, out=x[:1]), ValueError, r"\(2,\) does not fit an array of \(1,\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_written_to_is_refused(name: str) -> None:
    function, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        from_numpy(function)(torch.ones(2, dtype=torch.float64))
