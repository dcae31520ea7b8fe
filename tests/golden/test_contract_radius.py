"""The default contract's radius holds honest float32 kernels along rows and of products, and not coarser ones.

Largest share of the radius that any of them used, elementary functions as bad as allowed (a share above one would be
a false alarm in production), over ten times as many cases as here:

softmax 0.96, logsumexp 1.00, log_softmax 1.00, layernorm 0.96, rmsnorm 0.99, add_rmsnorm 1.00 (its sum: one rounding),
gelu 0.56, silu 1.00, swiglu 1.00, rope 0.99, gemm 0.99, linear 0.72, gemm_fp8 0.44, gemm_int8 0.31, gemm_int4 0.08,
moe 0.58.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from assay.precision.rounding import round_to
from tests.golden import honest_products, honest_rows
from tests.golden.allowance import KINDS, Use, rows, uses, worst
from tests.golden.float32 import Functions

Tensor = torch.Tensor
Call = tuple[tuple[Tensor, ...], dict[str, Any]]
SIGNS = (0, 1, -1)


def one(kind: str, n: int) -> Iterator[Call]:
    yield (rows(kind, 3, n),), {}


def affine(kind: str, n: int) -> Iterator[Call]:
    for weight in ("normal", "subnormal"):
        yield (rows(kind, 3, n), rows(weight, 1, n)[0], rows(weight, 1, n, seed=1)[0]), {}


def scaled(kind: str, n: int) -> Iterator[Call]:
    yield (rows(kind, 3, n), rows("normal", 1, n)[0]), {}
    yield (rows(kind, 3, n), rows("lognormal", 1, n)[0]), {"offset": 1.0}
    yield (rows(kind, 3, n), rows("subnormal", 1, n)[0]), {}


def added(kind: str, n: int) -> Iterator[Call]:
    for other in {"normal", kind}:
        yield (rows(kind, 3, n), rows(other, 3, n, seed=1), rows("normal", 1, n)[0]), {}


def gated(kind: str, n: int) -> Iterator[Call]:
    for up in ("normal", "lognormal"):
        yield (rows(kind, 3, n), rows(up, 3, n)), {"limit": 7.0 if up == "normal" else None}


def approximated(kind: str, n: int) -> Iterator[Call]:
    for approximate in ("none", "tanh"):
        yield (rows(kind, 3, n),), {"approximate": approximate}


def turned(kind: str, n: int) -> Iterator[Call]:
    angles = rows("normal", 1, n)
    for interleaved in (False, True):
        yield (rows(kind, 3, 2 * n).reshape(1, 1, 3, 2 * n), angles.cos(), angles.sin()), {"interleaved": interleaved}


ROWS: dict[str, tuple[Callable[..., Iterator[tuple[str, Any]]], Callable[[str, int], Iterator[Call]]]] = {
    "softmax": (honest_rows.softmaxes, one),
    "logsumexp": (honest_rows.logsumexps, one),
    "log_softmax": (honest_rows.log_softmaxes, one),
    "layernorm": (honest_rows.layernorms, affine),
    "rmsnorm": (honest_rows.rmsnorms, scaled),
    "add_rmsnorm": (honest_rows.add_rmsnorms, added),
    "gelu": (honest_rows.gelus, approximated),
    "silu": (honest_rows.silus, one),
    "swiglu": (honest_rows.swiglus, gated),
    "rope": (honest_rows.ropes, turned),
}


@pytest.mark.parametrize("op", ROWS)
def test_honest_kernels_along_rows_keep_the_contract(op: str, record_property: Any) -> None:
    """Any order of summation, any place for log2 e, online or not, functions as bad as allowed: within the radius."""
    kernels, calls = ROWS[op]
    found: list[Use] = []
    for n, kind in ((n, kind) for n in (1, 2, 33) for kind in KINDS):
        for tensors, options in calls(kind, n):
            sign = SIGNS[(KINDS.index(kind) + n) % 3]
            results = kernels(Functions(sign), *tensors, **options)
            found += uses(op, tensors, options, results, where=f"{kind} x {n}, {options}, {sign}")
    report(op, found, record_property)


def report(op: str, found: list[Use], record_property: Any) -> None:
    """Assert that the radius held; leave the largest share of it in the report."""
    most = worst(found)
    record_property("share", most.ratio)
    print(f"{op}: {most.ratio:.3f} by {most.kernel}, {most.where}, of {len(found)} evaluations")
    assert most.ratio <= 1, most


def codes(count: int, columns: int, seed: int = 0) -> Tensor:
    drawn = np.random.default_rng([seed, count, columns]).integers(0, 256, (count, columns))
    drawn[(drawn & 127) == 127] = 0
    return torch.from_numpy(drawn).to(torch.uint8)


def uniform(*shape: int) -> Tensor:
    return torch.from_numpy(np.asarray(np.random.default_rng(shape).random(shape) + 0.01)).float()


@pytest.mark.parametrize("op", ["gemm", "linear"])
def test_honest_products_keep_the_contract(op: str, record_property: Any) -> None:
    """Products in any order, fused or not, split over K: within gamma_K |a| |b|."""
    found: list[Use] = []
    for index, kind in enumerate(KINDS):
        for other in (KINDS[(index + shift) % len(KINDS)] for shift in (0, 3, 7)):
            a, b = rows(kind, 3, 24), rows(other, 4, 24, seed=1)
            tensors = (a, b.T.contiguous()) if op == "gemm" else (a, b, rows(kind, 1, 4)[0])
            kernels = honest_products.gemms if op == "gemm" else honest_products.linears
            found += uses(op, tensors, {}, kernels(Functions(0), *tensors), where=f"{kind} by {other}")
    report(op, found, record_property)


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_honest_fp8_products_keep_the_contract(granularity: str, record_property: Any) -> None:
    """Scales taken in before, after, or block by block."""
    found: list[Use] = []
    for inner in (1, 2, 33, 260):
        a, b = (codes(*shape).view(torch.float8_e4m3fn) for shape in ((3, inner), (inner, 130)))
        blocks = -(-inner // 128)
        shapes: dict[str, Any] = {
            "tensor": ((), ()), "row": ((3, 1), (1, 130)), "block": ((3, blocks), (blocks, 2)),
        }  # fmt: skip
        tensors = (a, b, *(uniform(*shape) for shape in shapes[granularity]))
        options = {"granularity": granularity}
        results = honest_products.fp8_gemms(Functions(0), *tensors, **options)
        found += uses("gemm_fp8", tensors, options, results, dtype="float8_e4m3fn", where=f"K = {inner}")
    report("gemm_fp8", found, record_property)


def test_honest_int8_products_keep_the_contract(record_property: Any) -> None:
    """Integers added exactly and scaled after, or dequantised first."""
    found: list[Use] = []
    for inner in (2, 33, 200):
        tensors = (codes(3, inner).view(torch.int8), codes(inner, 5).view(torch.int8), uniform(3, 1), uniform(1, 5))
        found += uses("gemm_int8", tensors, {}, honest_products.int8_gemms(Functions(0), *tensors), dtype="int8")
    report("gemm_int8", found, record_property)


def test_honest_int4_products_keep_the_contract(record_property: Any) -> None:
    """The zero-point taken off the codes, the weights, or the sum over each group."""
    found: list[Use] = []
    for kind in ("normal", "positive", "large mean", "lognormal", "cancelling", "small"):
        x, packed, scales, zeros = rows(kind, 3, 64), codes(32, 8), uniform(2, 8) / 10, codes(2, 8) % 16
        unpacked = torch.stack([packed & 15, packed >> 4], 1).reshape(64, 8).float()
        spread = [part.repeat_interleave(32, 0).float() for part in (zeros, scales)]
        results = honest_products.int4_gemms(Functions(0), x, unpacked, *spread)
        found += uses("gemm_int4", (x, packed, scales, zeros), {}, results, where=kind)
    report("gemm_int4", found, record_property)


def test_honest_experts_keep_the_contract(record_property: Any) -> None:
    """Routing weights applied before the second product or after it, choices added in either order."""
    found: list[Use] = []
    ids = torch.tensor([[0, 1], [1, 1], [2, 0]], dtype=torch.int32)
    for sign, kind in ((sign, kind) for sign in SIGNS for kind in ("normal", "wide", "positive", "large mean")):
        up, down = rows("normal", 30, 8).reshape(3, 10, 8), rows("normal", 24, 5).reshape(3, 8, 5)
        tensors = (rows(kind, 3, 8), up, down, uniform(3, 2), ids)
        found += uses("moe", tensors, {}, honest_products.moes(Functions(sign), *tensors), where=f"{kind}, {sign}")
    report("moe", found, record_property)


def tf32(x: Tensor) -> Tensor:
    return round_to(x, "tf32").float()


def half(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def one_pass(x: Tensor) -> Tensor:
    """Standardised by the textbook's variance."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / (x.square().mean(-1, keepdim=True) - mean * mean + 1e-5).sqrt()


def turned_coarsely(x: Tensor, angles: Tensor) -> Tensor:
    return next(iter(honest_rows.ropes(Functions(0), x, half(angles.cos()), half(angles.sin()))))[1]


X, W = rows("normal", 8, 64), rows("normal", 1, 64)[0]
SQUARE = rows("normal", 64, 64)
ANGLES = rows("normal", 8, 16)
F = torch.nn.functional
COARSE: dict[str, tuple[str, tuple[Tensor, ...], Tensor]] = {
    "softmax in bfloat16": ("softmax", (X,), torch.softmax(X.bfloat16(), -1)),
    "softmax with bfloat16 weights": ("softmax", (X,), half(X.exp()) / half(X.exp()).sum(-1, keepdim=True)),
    "logsumexp in bfloat16": ("logsumexp", (X,), half(X.exp()).sum(-1).log()),
    "log_softmax in bfloat16": ("log_softmax", (X,), torch.log_softmax(X.bfloat16(), -1)),
    "a bfloat16 mean": ("layernorm", (X + 9, W, W), F.layer_norm(half(X + 9), (64,), W, W)),
    "E[x^2] - m^2": ("layernorm", (X + 3e3, W, W), one_pass(X + 3e3) * W + W),
    "rmsnorm of bfloat16 squares": ("rmsnorm", (X, W), X * half(X * X).mean(-1, True).add(1e-6).rsqrt() * W),
    "rmsnorm rounded before the weight": ("rmsnorm", (X, W), half(X * X.square().mean(-1, True).rsqrt()) * W),
    "gelu by x sigmoid(1.702 x)": ("gelu", (X,), X * torch.sigmoid(1.702 * X)),
    "gelu by its tanh": ("gelu", (X,), F.gelu(X, approximate="tanh")),
    "silu in bfloat16": ("silu", (X,), F.silu(X.bfloat16())),
    "swiglu with a bfloat16 gate": ("swiglu", (X, X.flip(0)), half(F.silu(X)) * X.flip(0)),
    "rope with bfloat16 angles": (
        "rope", (X.reshape(1, 8, 2, 32), ANGLES.cos(), ANGLES.sin()), turned_coarsely(X.reshape(1, 8, 2, 32), ANGLES),
    ),
    "gemm in TF32": ("gemm", (X, SQUARE), tf32(X) @ tf32(SQUARE)),
    "gemm in bfloat16": ("gemm", (X, SQUARE), half(X) @ half(SQUARE)),
    "linear in TF32": ("linear", (X, SQUARE, W), tf32(X) @ tf32(SQUARE).T + W),
    "gemm without the last column": ("gemm", (X, SQUARE), X[:, :63] @ SQUARE[:63]),
}  # fmt: skip


@pytest.mark.parametrize("name", COARSE)
def test_a_coarser_evaluation_breaks_the_contract(name: str, record_property: Any) -> None:
    """Evaluated in bfloat16 or TF32, or by a cruder formula, the same inputs give results beyond the radius."""
    op, tensors, y = COARSE[name]
    share = worst(uses(op, tensors, {}, [(name, y)])).ratio
    record_property("share", share)
    assert share > 2
