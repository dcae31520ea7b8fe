"""A NumPy function as a function of torch tensors gives what NumPy gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.golden.errors import MissingOperation
from assay.golden.reference.frameworks.numpy_like import from_numpy


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
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gives_what_numpy_gives(name: str) -> None:
    """Values are those of NumPy in float64."""
    x = np.random.default_rng(0).standard_normal((4, 8))
    got = from_numpy(FUNCTIONS[name])(torch.tensor(x))
    np.testing.assert_allclose(got.numpy(), FUNCTIONS[name](x), rtol=1e-12, atol=1e-14)


def test_what_leaves_the_protocol_is_refused() -> None:
    """A conversion into an array of NumPy's own would lose what the numbers hold."""
    with pytest.raises(MissingOperation, match="own functions alone"):
        from_numpy(lambda x: np.asarray(x) + 1)(torch.ones(2))
