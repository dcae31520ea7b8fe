"""Functions, losses and gradients against formulas that use nothing of the definitions: math, and torch's autograd."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from assay.golden import Golden, evaluate

INF, NAN = math.inf, math.nan
RNG = np.random.default_rng(23)
Tensor = torch.Tensor


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(RNG.standard_normal(shape) * scale).float()


def goldens_of(op: str, *tensors: Any, **options: Any) -> tuple[Golden, ...]:
    found = evaluate(op, *tensors, **options)
    return found if isinstance(found, tuple) else (found,)


def agree(golden: Golden, expected: Any) -> bool:
    """Whether a golden is sharp, and lies at what a float64 evaluation gives, up to that one's own errors."""
    other = torch.as_tensor(expected, dtype=torch.float64)
    slack = 1e-10 * (1 + other.abs().max()) if other.numel() else 0.0
    sharp = bool((golden.radius <= slack).all())
    return sharp and golden.value.shape == other.shape and bool(((golden.value - other).abs() <= slack).all())


SERIES: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "expm1": math.expm1,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "tanh": lambda x: (cmath.exp(2 * x) - 1).real / (cmath.exp(2 * x) + 1).real,
    "erf": math.erf,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "softplus": lambda x: math.log(1 + math.exp(x)),
    "sqrt": lambda x: x**0.5,
    "rsqrt": lambda x: x**-0.5,
    "reciprocal": lambda x: 1 / x,
    "sin": lambda x: cmath.exp(1j * x).imag,
    "cos": lambda x: cmath.exp(1j * x).real,
}
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "reciprocal")


@pytest.mark.parametrize("op", SERIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_functions_are_their_textbooks(op: str, dtype: torch.dtype) -> None:
    """The value of each elementary function, number by number."""
    x = normal(4, 6, scale=2.0)
    x = (x.abs() + 0.1 if op in POSITIVE else x).to(dtype)
    assert agree(goldens_of(op, x)[0], [[SERIES[op](value) for value in row] for row in x.tolist()])


EDGES = {
    "exp": [0, INF, 1, 1], "exp2": [0, INF, 1, 1], "expm1": [-1, INF, 0, 0], "log": [NAN, INF, -INF, -INF],
    "log2": [NAN, INF, -INF, -INF], "log1p": [NAN, INF, 0, 0], "tanh": [-1, 1, 0, 0], "erf": [-1, 1, 0, 0],
    "sigmoid": [0, 1, 0.5, 0.5], "softplus": [0, INF, math.log(2), math.log(2)], "sqrt": [NAN, INF, 0, 0],
    "rsqrt": [NAN, 0, INF, -INF], "reciprocal": [0, 0, INF, -INF], "sin": [NAN, NAN, 0, 0], "cos": [NAN, NAN, 1, 1],
}  # fmt: skip
"""At -inf, at inf, and at the two zeros."""


@pytest.mark.parametrize("digits", [None, 30])
@pytest.mark.parametrize("op", EDGES)
def test_functions_at_their_edges(op: str, digits: int | None) -> None:
    """Limits where they exist, poles with the sign of the zero, NaN outside of the domain and of NaN."""
    (golden,) = goldens_of(op, torch.tensor([[-INF, INF, 0.0, -0.0, NAN]]), digits=digits)
    expected = torch.tensor([[*EDGES[op], NAN]], dtype=torch.float64)
    assert torch.equal(golden.value.isnan(), expected.isnan())
    finite = expected.isfinite()
    assert torch.equal(golden.value[~finite & ~expected.isnan()], expected[~finite & ~expected.isnan()])
    assert ((golden.value[finite] - expected[finite]).abs() <= 1e-15).all()
    (outside,) = goldens_of(op, torch.tensor([[-2.0]]), digits=digits)
    assert bool(outside.value.isnan()) is (op in ("log", "log2", "log1p", "sqrt", "rsqrt"))


def autograd(
    forward: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor | None = None
) -> tuple[Tensor, ...]:
    inputs = [leaf.double().requires_grad_() for leaf in leaves]
    out = forward(*inputs)
    return torch.autograd.grad(out, inputs, torch.ones_like(out) if upstream is None else upstream.double())


X, DY = normal(5, 9, scale=2.0), normal(5, 9)
W, B = normal(9), normal(9)


def test_softmax_backward_is_the_jacobian() -> None:
    """dx_i = sum_j dy_j y_j (delta_ij - y_i), for any y."""
    jacobians = [torch.diag(y) - torch.outer(y, y) for y in X.double()]
    (golden,) = goldens_of("softmax_backward", X, DY)
    assert agree(golden, torch.stack([jacobian @ dy for jacobian, dy in zip(jacobians, DY.double(), strict=True)]))


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_norm_gradients_are_autograds(eps: float) -> None:
    """dx, dweight and dbias of torch's layer norm and of an RMS norm written out."""
    expected = autograd(lambda x, w, b: F.layer_norm(x, (9,), w, b, eps), [X, W, B], DY)
    found = goldens_of("layernorm_backward", X, W, DY, eps=eps)
    assert all(map(agree, found, expected))
    expected = autograd(lambda x, w: x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w, [X, W], DY)
    assert all(map(agree, goldens_of("rmsnorm_backward", X, W, DY, eps=eps), expected))


def test_swiglu_gradient_is_autograds() -> None:
    """dgate and dup, and the slope's limits at the infinities: none at -inf, one at inf."""
    found = goldens_of("swiglu_backward", X, DY, B.expand(5, 9))
    assert all(map(agree, found, autograd(lambda g, u: F.silu(g) * u, [X, DY], B.expand(5, 9))))
    ends = torch.tensor([[-INF, INF]])
    dgate, dup = goldens_of("swiglu_backward", ends, torch.tensor([[3.0, 3.0]]), torch.tensor([[2.0, 2.0]]))
    assert dgate.value.tolist() == [[0.0, 6.0]]
    assert dup.value.tolist() == [[0.0, INF]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_cross_entropy_is_torchs(reduction: str, smoothing: float, ignore_index: int) -> None:
    """The loss and its gradient, with labels that are ignored, which are then no classes."""
    target = torch.tensor([0, ignore_index, 8, 3, ignore_index])
    if ignore_index == -100:
        target = target.clamp(min=-100)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    (golden,) = goldens_of("cross_entropy", X, target, **options)
    assert agree(golden, F.cross_entropy(X.double(), target, **options))
    (expected,) = autograd(lambda x: F.cross_entropy(x, target, **options), [X])
    assert agree(goldens_of("cross_entropy_backward", X, target, **options)[0], expected)


def test_ignored_rows_reach_nothing() -> None:
    """NaN logits of an ignored token change neither loss nor gradients; where all are ignored the mean is NaN."""
    spoiled, target = X.clone(), torch.tensor([0, -100, 8, 3, -100])
    spoiled[1], spoiled[4, 2] = NAN, INF
    for op in ("cross_entropy", "cross_entropy_backward"):
        (clean,), (other,) = (goldens_of(op, logits, target) for logits in (X, spoiled))
        assert torch.equal(clean.value, other.value)
    nobody = torch.full((5,), -100)
    assert goldens_of("cross_entropy", spoiled, nobody)[0].value.isnan()
    assert goldens_of("cross_entropy", spoiled, nobody, reduction="sum")[0].value == 0
    assert not goldens_of("cross_entropy_backward", spoiled, nobody)[0].value.any()


def attend(causal: str, scale: float | None) -> Callable[..., Tensor]:
    """Attention row by row, heads in groups."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared, width = q.shape[1] // k.shape[1], q.shape[3]
        offset = {"top_left": 0}.get(causal, k.shape[2] - q.shape[2])
        rows = []
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                last = k.shape[2] if causal == "none" else max(0, min(k.shape[2], i + offset + 1))
                keys, values = (part[0, h // shared, :last] for part in (k, v))
                scores = keys @ q[0, h, i] * (width**-0.5 if scale is None else scale)
                rows.append(torch.softmax(scores, 0) @ values)
        return torch.stack(rows).reshape(1, q.shape[1], q.shape[2], v.shape[3])

    return forward


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("queries", "keys", "scale"), [(4, 6, None), (6, 4, 0.3), (1, 5, -1.0)])
def test_attention_gradients_are_autograds(causal: str, queries: int, keys: int, scale: float | None) -> None:
    """dq, dk and dv, in which heads that share keys add up; rows that see nothing give and get zero."""
    q, k, v = normal(1, 6, queries, 5), normal(1, 2, keys, 5), normal(1, 2, keys, 3)
    dout = normal(1, 6, queries, 3)
    expected = autograd(attend(causal, scale), [q, k, v], dout)
    assert all(map(agree, goldens_of("attention_backward", q, k, v, dout, causal=causal, scale=scale), expected))


def test_what_is_masked_never_reaches_a_gradient() -> None:
    """NaN in a key, a value, a query or an upstream gradient stays with those that see it."""
    q, k, v, dout = normal(1, 1, 3, 4), normal(1, 1, 5, 4), normal(1, 1, 5, 4), normal(1, 1, 3, 4)
    clean = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    k[..., 4, :], v[..., 4, 1] = NAN, INF  # no query sees the last keys
    same = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    assert all(torch.equal(a.value, b.value) for a, b in zip(clean, same, strict=True))
    q[..., 0, 2] = NAN  # the first query sees the first key only
    dq, dk, dv = goldens_of("attention_backward", q, k, v, dout, causal="top_left")
    for found, before in ((dq, clean[0]), (dk, clean[1]), (dv, clean[2])):
        assert found.value[..., 0, :].isnan().all()
        assert torch.equal(found.value[..., 1:, :], before.value[..., 1:, :])


def test_gradients_in_blocks_are_those_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However rows are blocked the gradients are the same to within their radii."""
    from assay.golden.arithmetic import BallArithmetic

    tensors = normal(1, 4, 7, 3), normal(1, 2, 5, 3), normal(1, 2, 5, 2), normal(1, 4, 7, 2)
    whole = goldens_of("attention_backward", *tensors, causal="bottom_right")
    monkeypatch.setattr(BallArithmetic, "blocks", lambda self, rows, width: [(0, 1), (1, 3), (3, rows)])
    parts = goldens_of("attention_backward", *tensors, causal="bottom_right")
    for a, b in zip(whole, parts, strict=True):
        assert ((a.value - b.value).abs() <= a.radius + b.radius).all()
