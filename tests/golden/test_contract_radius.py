"""The default contract's radius holds honest float32 kernels of all kinds but attention, and not coarser ones.

Largest share of the radius that any of them used, elementary functions as bad as allowed (a share above one would be
a false alarm in production), over ten times as many cases as here:

softmax 0.96, logsumexp 1.00, log_softmax 1.00, layernorm 0.96, rmsnorm 0.99, add_rmsnorm 1.00 (its sum: one rounding),
gelu 0.56, silu 1.00, swiglu 1.00, rope 0.99, gemm 0.99, linear 0.72, gemm_fp8 0.44, gemm_int8 0.31, gemm_int4 0.08,
moe 0.58. The others' stand in the lines of `report`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.rounding import round_to
from assay.golden.arithmetic.real import torch_function
from assay.golden.definitions.activations import FUNCTIONS
from tests.golden import honest_gradients, honest_products, honest_rows
from tests.golden.allowance import (
    KINDS,
    SIGNS,
    Call,
    Kernels,
    Kinds,
    Use,
    by_thirds,
    codes,
    report,
    rows,
    used_along_rows,
    uses,
    worst,
)
from tests.golden.float32 import Functions

Tensor = torch.Tensor
LARGEST = torch.finfo(torch.float32).max / 2


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


def of_softmax(kind: str, n: int) -> Iterator[Call]:
    yield (torch.softmax(rows("normal", 3, n), -1), rows(kind, 3, n)), {}
    yield (rows("lognormal", 3, n), rows(kind, 3, n)), {}


def of_norm(kind: str, n: int) -> Iterator[Call]:
    for dy in ("normal", "lognormal", "cancelling"):
        yield (rows(kind, 5, n), rows("normal", 1, n)[0], rows(dy, 5, n, seed=1)), {}


def of_swiglu(kind: str, n: int) -> Iterator[Call]:
    for up in ("normal", "lognormal"):
        yield (rows(kind, 3, n), rows(up, 3, n), rows("normal", 3, n, seed=1)), {}


def labelled(kind: str, n: int) -> Iterator[Call]:
    logits, target = rows(kind, 4, n), torch.arange(4) % n
    target[1] = -100
    for reduction, smoothing in (("mean", 0.0), ("sum", 0.25), ("none", 0.9), ("mean", 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": -100}
        yield (logits, target), options


FEW = tuple(kind for kind in KINDS if kind not in ("nearly overflowing", "huge", "subnormal", "small"))
ROWS: dict[str, tuple[Kernels, Callable[[str, int], Iterator[Call]], Kinds]] = {
    "softmax": (honest_rows.softmaxes, one, KINDS),
    "logsumexp": (honest_rows.logsumexps, one, KINDS),
    "log_softmax": (honest_rows.log_softmaxes, one, KINDS),
    "layernorm": (honest_rows.layernorms, affine, KINDS),
    "rmsnorm": (honest_rows.rmsnorms, scaled, KINDS),
    "add_rmsnorm": (honest_rows.add_rmsnorms, added, KINDS),
    "gelu": (honest_rows.gelus, approximated, KINDS),
    "silu": (honest_rows.silus, one, KINDS),
    "swiglu": (honest_rows.swiglus, gated, KINDS),
    "rope": (honest_rows.ropes, turned, KINDS),
    "softmax_backward": (honest_gradients.softmax_backwards, of_softmax, FEW),
    "layernorm_backward": (honest_gradients.layernorm_backwards, of_norm, FEW),
    "rmsnorm_backward": (honest_gradients.rmsnorm_backwards, of_norm, FEW),
    "swiglu_backward": (honest_gradients.swiglu_backwards, of_swiglu, FEW),
    "cross_entropy": (honest_gradients.cross_entropies, labelled, FEW),
    "cross_entropy_backward": (honest_gradients.cross_entropy_backwards, labelled, FEW),
}


@by_thirds
@pytest.mark.parametrize("op", ROWS)
def test_honest_kernels_along_rows_keep_the_contract(op: str, third: slice, record_property: Any) -> None:
    """Any order of summation, any formula in use, log2 e anywhere, functions as bad as allowed: within the radius."""
    kernels, calls, kinds = ROWS[op]
    report(op, used_along_rows(op, kernels, calls, kinds[third]), record_property)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_honest_functions_keep_the_contract(op: str, record_property: Any) -> None:
    """As far off as their ulps allow, and composed of others: within the radius."""
    found: list[Use] = []
    for kind, sign in ((kind, sign) for kind in KINDS for sign in SIGNS):
        x = rows(kind, 3, 40)
        x = torch.where(torch_function(op, x.double()).abs() > LARGEST, 1.0, x)  # what lies beyond is the store's
        results = ((name, function(x)) for name, function in honest_gradients.functions(op, sign))
        found += uses(op, (x,), {}, results, where=f"{kind}, {sign}")
    report(op, found, record_property)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_honest_attention_gradients_keep_the_contract(dtype: torch.dtype, record_property: Any) -> None:
    """delta from the probabilities or the output, both stages rounded, the scale anywhere: within the radius."""
    name = str(dtype).removeprefix("torch.")
    found: list[Use] = []
    for index, kind in enumerate(
        ("normal", "wide", "positive", "large mean", "ties", "cancelling", "peaked", "near zero")
    ):
        for queries, keys in ((5, 1), (7, 19)):
            q, dout = (rows(k, queries, 8, seed)[None, None] for k, seed in ((kind, 0), ("normal", 2)))
            k, v = (rows(k, keys, 8, seed)[None, None] for k, seed in (("normal", 1), (kind, 3)))
            tensors = tuple(part.to(dtype) for part in (q, k, v, dout))
            for causal in ("none", "bottom_right"):
                stage = None if dtype == torch.float32 else dtype
                kernels = honest_gradients.attention_backwards(
                    Functions(SIGNS[index % 3]), *tensors, stage, causal=causal
                )
                where = f"{kind}, {queries} x {keys}, {causal}"
                found += uses("attention_backward", tensors, {"causal": causal}, kernels, dtype=name, where=where)
    report(f"attention_backward {name}", found, record_property)


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


def first(kernels: Kernels, *tensors: Tensor) -> Any:
    return next(kernels(Functions(0), *tensors))[1]


X, W, DY = rows("normal", 8, 64), rows("normal", 1, 64)[0], rows("normal", 8, 64, 1)
Y, SPREAD, TARGET = torch.softmax(X, -1), W.expand(8, 64), torch.arange(8)
SQUARE = rows("normal", 64, 64)
HEADS, ANGLES = X.reshape(1, 8, 2, 32), rows("normal", 8, 16)
F = torch.nn.functional
COARSE: dict[str, tuple[str, tuple[Tensor, ...], Any]] = {
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
        "rope", (HEADS, ANGLES.cos(), ANGLES.sin()),
        first(honest_rows.ropes, HEADS, half(ANGLES.cos()), half(ANGLES.sin())),
    ),
    "gemm in TF32": ("gemm", (X, SQUARE), tf32(X) @ tf32(SQUARE)),
    "gemm in bfloat16": ("gemm", (X, SQUARE), half(X) @ half(SQUARE)),
    "linear in TF32": ("linear", (X, SQUARE, W), tf32(X) @ tf32(SQUARE).T + W),
    "gemm without the last column": ("gemm", (X, SQUARE), X[:, :63] @ SQUARE[:63]),
    "softmax's gradient: a bfloat16 sum": ("softmax_backward", (Y, DY), Y * (DY - half((Y * DY).sum(-1, True)))),
    "layernorm's: bfloat16 rows": (
        "layernorm_backward", (X, W, DY), first(honest_gradients.layernorm_backwards, half(X), W, DY),
    ),
    "rmsnorm's: a bfloat16 weight": (
        "rmsnorm_backward", (X, W, DY), first(honest_gradients.rmsnorm_backwards, X, half(W), DY),
    ),
    "swiglu's: a bfloat16 gate": (
        "swiglu_backward", (X, DY, SPREAD), first(honest_gradients.swiglu_backwards, half(X), DY, SPREAD),
    ),
    "cross-entropy of bfloat16 logits": ("cross_entropy", (X, TARGET), F.cross_entropy(half(X), TARGET)),
    "its gradient by bfloat16 shares": (
        "cross_entropy_backward", (X, TARGET), (half(Y) - torch.eye(8, 64)) / 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COARSE)
def test_a_coarser_evaluation_breaks_the_contract(name: str, record_property: Any) -> None:
    """Evaluated in bfloat16 or TF32, or by a cruder formula, the same inputs give results beyond the radius."""
    op, tensors, y = COARSE[name]
    share = worst(uses(op, tensors, {}, [(name, y)])).ratio
    record_property("share", share)
    assert share > 2


@pytest.mark.parametrize("stage", ["probabilities", "score_gradient"])
def test_stages_are_allowed_only_where_the_contract_says_so(stage: str) -> None:
    """float32 inputs with one stage rounded to bfloat16 are beyond the default radius."""
    q, k, v, dout = (rows("normal", 16, 16, seed)[None, None] for seed in range(4))
    results = honest_gradients.attention_backwards(Functions(0), q, k, v, dout, torch.bfloat16)
    honest_ones = honest_gradients.attention_backwards(Functions(0), q, k, v, dout, None)
    assert worst(uses("attention_backward", (q, k, v, dout), {}, honest_ones)).ratio <= 1
    place = 2 if stage == "probabilities" else 0
    found = [use for use in uses("attention_backward", (q, k, v, dout), {}, results) if use.result == place]
    assert worst(found).ratio > 2
