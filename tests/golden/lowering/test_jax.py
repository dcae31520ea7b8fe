"""A JAX function as a function of torch tensors gives what JAX gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from assay.golden.errors import MissingOperation

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax import lax, nn  # noqa: E402

from assay.golden.lowering.frameworks import framework_of  # noqa: E402
from assay.golden.lowering.jaxpr import from_jax  # noqa: E402

_PAIR = np.array([0, 0, 2])
_KERNEL = np.arange(18.0).reshape(3, 3, 1, 2)


def _convolution(x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x.reshape(1, 4, 8, 1), _KERNEL, (1, 2), "SAME", dimension_numbers=numbers)


def _transposed_convolution(x: Any) -> Any:
    return lax.conv_transpose(
        x.reshape(1, 4, 8, 1), _KERNEL, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _grouped_convolution(x: Any) -> Any:
    weight = np.arange(12.0).reshape(4, 1, 3)
    return lax.conv_general_dilated(
        x.reshape(1, 2, 16), weight, (1,), [(2, 3)], rhs_dilation=(2,), feature_group_count=2
    )


def _pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")


def _attention(x: Any) -> Any:
    scores = jnp.einsum("ij,kj->ik", x, x) / 8**0.5
    return nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -jnp.inf)) @ x


def _scanned(reverse: bool) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda carry, row: (0.5 * carry + row, carry.sum()), x[0], x, reverse=reverse)


def _recurrence(x: Any) -> Any:
    return lax.associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, x), axis=1)


def _gradient(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(function(x) * jnp.cos(function(x))))


@jax.jit
def silu(x: Any) -> Any:
    return x * nn.sigmoid(1.702 * x)


def _shifted(x: Any, axis: int) -> Any:
    return jnp.exp(x - x.max(axis, keepdims=True))


SQUARES: dict[str, Callable[[Any], Any]] = {
    "softmax written out": lambda x: (e := _shifted(x, -1)) / e.sum(-1)[..., None],
    "sums put back along columns": lambda x: (e := _shifted(x, -1)) / e.sum(-1)[..., None, :],
    "sums of columns put back along rows": lambda x: (e := _shifted(x, -2)) / e.sum(-2)[..., None],
    "maxima put back along columns": lambda x: (e := jnp.exp(x - x.max(-1)[..., None, :])) / e.sum(-1, keepdims=True),
    "sums transposed": lambda x: (e := _shifted(x, -1)) / e.sum(-1, keepdims=True).mT,
    "sums of others": lambda x: _shifted(x, -1) / _shifted(x + x.mT, -1).sum(-1, keepdims=True),
    "sums of the square root": lambda x: (
        _shifted(x, -1) / jnp.exp((x - x.max(-1, keepdims=True)) / 2).sum(-1)[..., None]
    ),
    "sums of one matrix for another": lambda x: (e := _shifted(x, -1)) / jnp.moveaxis(e.sum(-1), 0, 1)[..., None],
}
"""Quotients of exponentials of square matrices, of which only the first is a softmax of rows."""

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": nn.softmax,
    "softmax of columns": lambda x: nn.softmax(x, axis=0),
    "log softmax": nn.log_softmax,
    "log softmax of columns": lambda x: nn.log_softmax(x, axis=0),
    "log-sum-exp": lambda x: nn.logsumexp(x, axis=-1),
    "activations": lambda x: [f(x) for f in (nn.gelu, nn.silu, nn.relu, nn.elu, nn.softplus, nn.mish, nn.hard_swish)],
    "gelu by erf": lambda x: nn.gelu(x, approximate=False),
    "log sigmoid, glu": lambda x: (nn.log_sigmoid(x), nn.glu(x)),
    "standardize": nn.standardize,
    "moments": lambda x: (jnp.mean(x), jnp.var(x, axis=-1, ddof=1), jnp.std(x), jnp.linalg.norm(x, axis=-1)),
    "products": lambda x: (
        x @ x.T,
        jnp.einsum("bij,bjk->bik", x.reshape(4, 2, 4), x.reshape(4, 4, 2)),
        jnp.outer(x, x),
    ),
    "attention": _attention,
    "convolution": _convolution,
    "transposed convolution": _transposed_convolution,
    "grouped convolution": _grouped_convolution,
    "pooling": lambda x: (_pool(x), lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 2), "SAME")),
    "running": lambda x: (jnp.cumsum(x, -1), jnp.cumprod(x, 0), lax.cummax(x, 1, reverse=True), lax.cumlogsumexp(x, 1)),
    "reductions": lambda x: (jnp.prod(x, -1), jnp.any(x > 0, -1), jnp.all(x > -1), jnp.max(x, (0, 1)), jnp.min(x)),
    "choices": lambda x: (jnp.sort(x, 0), jnp.argsort(x), lax.top_k(x, 3), jnp.argmax(x, 0), jnp.median(x, -1)),
    "two keys": lambda x: lax.sort((jnp.round(x), x, x + 1), num_keys=2),
    "rows by place": lambda x: (jnp.take(x, np.array([0, 2, 9]), axis=1), x[np.array([[0, 1], [3, 2]])], x[:, -1]),
    "places of each row": lambda x: jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True), -1),
    "writes": lambda x: (x.at[_PAIR].add(1.0), x.at[1, 2:4].set(5.0), x.at[:, _PAIR].max(0.3), x.at[2].mul(3.0)),
    "dynamic": lambda x: (lax.dynamic_slice(x, (2, 7), (2, 3)), lax.dynamic_update_slice(x, x[:1, :2], (3, 7))),
    "shapes": lambda x: (jnp.roll(x, 2, -1), jnp.repeat(x, 2, 0), jnp.tile(x, (2, 1)), x[:, ::-1], jnp.split(x, 2, 1)),
    "padding": lambda x: (jnp.pad(x, ((0, 1), (2, 1))), lax.pad(x, np.float64(0.5), ((-1, 2, 1), (1, -2, 0)))),
    "masks": lambda x: (
        jnp.tril(x),
        jnp.where(x > 0, x, 0),
        jnp.clip(x, -0.5, 0.5),
        jnp.select([x > 1, x > 0], [x, -x], 0),
    ),
    "whole numbers": lambda x: (
        jnp.arange(8) * x,
        nn.one_hot(np.array([1, 2]), 4),
        jnp.arange(4) << 1,
        jnp.arange(9) // 2,
    ),
    "division": lambda x: (jnp.mod(x, 0.3), x // 0.3, jnp.round(x), jnp.trunc(x), jnp.sign(x), x**3, jnp.abs(x) ** 1.5),
    "loop": lambda x: lax.fori_loop(0, 3, lambda step, y: y * 0.5 + x, x),
    "while": lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2 + x), (0, x)),
    "scan": _scanned(reverse=False),
    "scan from the end": _scanned(reverse=True),
    "associative scan": _recurrence,
    "branch": lambda x: lax.cond(x[0, 0] > 0, lambda y: y + 1, lambda y: y * 2, x),
    "vmap": lambda x: jax.vmap(lambda row: row @ row)(x),
    "jit, checkpoint": lambda x: jax.jit(jax.checkpoint(jnp.sin))(x),
    "segments": lambda x: jax.ops.segment_sum(x, np.array([0, 1, 0, 2]), 3),
    "gradient of softmax": _gradient(nn.softmax),
    "gradient of standardize": _gradient(nn.standardize),
    "gradient of a convolution": _gradient(_convolution),
    "gradient of a pooling": _gradient(_pool),
    "gradient of a sum": _gradient(lambda x: jnp.cumsum(jnp.max(x, -1))),
    "gradient of rows by place": _gradient(lambda x: jnp.take(x, _PAIR, axis=0)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gives_what_jax_gives(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 8))
    with jax.enable_x64(True):
        wanted = jax.tree_util.tree_leaves(FUNCTIONS[name](jnp.asarray(x)))
        results = jax.tree_util.tree_leaves(from_jax(FUNCTIONS[name])(torch.tensor(x)))
    for want, got in zip(wanted, results, strict=True):
        assert str(got.dtype) == f"torch.{want.dtype}"
        np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", SQUARES)
def test_only_a_softmax_is_taken_for_one(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((4, 4, 4))
    with jax.enable_x64(True):
        wanted = SQUARES[name](jnp.asarray(x))
        got = from_jax(SQUARES[name])(torch.tensor(x))
    np.testing.assert_allclose(got.numpy(), np.asarray(wanted), rtol=1e-12)


def test_the_softmax_that_jax_writes_out_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    softmax = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, axis: asked.append(axis) or softmax(x, axis))
    x = torch.randn(3, 4, 5)
    by_jax = [lambda x, axis=axis: nn.softmax(x, axis=axis) for axis in range(3)]
    for function in (*by_jax, SQUARES["softmax written out"]):
        from_jax(function)(x)
    assert asked == [0, 1, 2, 2]


def test_a_reference_s_own_function_is_not_taken_for_that_of_jax() -> None:
    x = torch.linspace(-3, 3, 8)
    torch.testing.assert_close(from_jax(silu)(x), x * torch.sigmoid(1.702 * x))


def test_products_of_16_bits_are_summed_in_the_dtype_that_jax_is_told() -> None:
    product = from_jax(lambda a: jnp.dot(a, a.T, preferred_element_type=jnp.float32))
    a = torch.randn(4, 300, dtype=torch.bfloat16)
    assert product(a).dtype == torch.float32
    torch.testing.assert_close(product(a), a.float() @ a.float().T)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x + jax.random.normal(jax.random.PRNGKey(0), x.shape), "draws random numbers"),
        (lambda x: jnp.abs(jnp.fft.fft(x)), "fft has no lowering rule"),
    ],
)
def test_what_cannot_be_said_is_refused_with_its_line(function: Any, words: str) -> None:
    with pytest.raises(MissingOperation, match=f"test_jax.py.*{words}"):
        from_jax(function)(torch.ones(4, 8))


def test_a_framework_is_told_by_the_names_that_a_function_uses() -> None:
    assert framework_of(jax.jit(_convolution)) == framework_of(_gradient(_pool)) == framework_of(_attention) == "jax"
    assert framework_of(lambda x: np.exp(x)) == framework_of(np.exp) == "numpy"
    assert framework_of(lambda x: torch.exp(x)) == framework_of(torch.nn.functional.silu) == "torch"
    assert framework_of(lambda x: torch.tensor(np.sqrt(2)) * x) == framework_of(lambda x: x + 1) == "torch"
