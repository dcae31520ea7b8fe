"""Definitions against formulas written anew, from the texts of the interface and of the formats that others define.

Containment can't see a wrong definition, for every arithmetic runs the same one. Here nothing of it is used.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from assay.golden import Golden, evaluate

INF = math.inf
RNG = np.random.default_rng(11)


def normal(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape) * scale).to(dtype)


def golden_of(op: str, *tensors: Any, **options: Any) -> Golden:
    golden = evaluate(op, *tensors, **options)
    return golden[0] if isinstance(golden, tuple) else golden


def agree(golden: Golden, expected: Any) -> bool:
    """Whether a golden is sharp, and lies at what a float64 evaluation gives, up to that one's own errors."""
    other = torch.as_tensor(expected, dtype=torch.float64)
    slack = 1e-11 * (1 + other.abs().max()) if other.numel() else 0.0
    sharp = golden.radius <= slack
    return tuple(golden.value.shape) == tuple(other.shape) and bool(
        (((golden.value - other).abs() <= slack) & sharp).all()
    )


X = normal(5, 9, scale=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("op", "reference"),
    [
        ("softmax", lambda x: torch.softmax(x, -1)),
        ("log_softmax", lambda x: torch.log_softmax(x, -1)),
        ("logsumexp", lambda x: torch.logsumexp(x, -1)),
        ("silu", F.silu),
        ("gelu", F.gelu),
    ],
)
def test_functions_of_rows(op: str, reference: Any, dtype: torch.dtype) -> None:
    """Softmax, its relatives and the activations are torch's, evaluated in float64 on the values as stored."""
    assert agree(golden_of(op, X.to(dtype)), reference(X.to(dtype).double()))


def test_softmax_by_its_formula() -> None:
    """y_i = exp(x_i) / sum_j exp(x_j), written out."""
    rows = [[math.exp(x) / sum(math.exp(other) for other in row) for x in row] for row in X.double().tolist()]
    assert agree(golden_of("softmax", X), rows)


def test_gelu_by_its_formulas() -> None:
    """x Phi(x) by erfc, and the tanh approximation with its two constants."""
    exact = [[x * math.erfc(-x / math.sqrt(2)) / 2 for x in row] for row in X.double().tolist()]
    assert agree(golden_of("gelu", X), exact)
    inner = [[math.sqrt(2 / math.pi) * (x + 0.044715 * x**3) for x in row] for row in X.double().tolist()]
    tanh = [
        [x / 2 * (1 + math.tanh(z)) for x, z in zip(*pair, strict=True)] for pair in zip(X.tolist(), inner, strict=True)
    ]
    assert agree(golden_of("gelu", X, approximate="tanh"), tanh)
    assert agree(golden_of("gelu", X, approximate="tanh"), F.gelu(X.double(), approximate="tanh"))


@pytest.mark.parametrize("limit", [None, 1.0, 0.25])
def test_swiglu_by_its_formula(limit: float | None) -> None:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    up = normal(5, 9, scale=3.0)
    bound = INF if limit is None else limit
    expected = [
        [
            min(g, bound) / (1 + math.exp(-min(g, bound))) * max(-bound, min(u, bound))
            for g, u in zip(*pair, strict=True)
        ]
        for pair in zip(X.double().tolist(), up.double().tolist(), strict=True)
    ]
    assert agree(golden_of("swiglu", X, up, limit=limit), expected)


def test_limits_at_infinity() -> None:
    """silu and gelu vanish at -inf and are x at +inf; a softmax row of all -inf is NaN, a part of it zero."""
    ends = torch.tensor([[-INF, INF, -1e5]])
    for op, options in (("silu", {}), ("gelu", {}), ("gelu", {"approximate": "tanh"})):
        assert golden_of(op, ends, **options).value.tolist() == [[0.0, INF, 0.0]]
    assert golden_of("softmax", torch.full((1, 3), -INF)).value.isnan().all()
    assert agree(golden_of("softmax", torch.tensor([[-INF, 2.0, 2.0]])), [[0.0, 0.5, 0.5]])


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layernorm_is_torchs(eps: float) -> None:
    """The biased variance, eps beneath the root, weight and bias after."""
    weight, bias = normal(9), normal(9)
    expected = F.layer_norm(X.double(), (9,), weight.double(), bias.double(), eps)
    assert agree(golden_of("layernorm", X, weight, bias, eps=eps), expected)


@pytest.mark.parametrize(("eps", "offset"), [(1e-6, 0.0), (0.5, 1.0)])
def test_rmsnorm_by_its_formula(eps: float, offset: float) -> None:
    """x_i / sqrt(mean x^2 + eps) * (weight_i + offset); of x + residual in the fused op, which returns the sum too."""
    weight, residual = normal(9), normal(5, 9)

    def rms(rows: list[list[float]], offset: float) -> list[list[float]]:
        scaled = [[x / math.sqrt(sum(v * v for v in row) / len(row) + eps) for x in row] for row in rows]
        return [[y * (w + offset) for y, w in zip(row, weight.double().tolist(), strict=True)] for row in scaled]

    assert agree(golden_of("rmsnorm", X, weight, eps=eps, offset=offset), rms(X.double().tolist(), offset))
    total = X.double() + residual.double()
    normed, summed = evaluate("add_rmsnorm", X, residual, weight, eps=eps)  # type: ignore[misc]
    assert agree(normed, rms(total.tolist(), 0.0))
    assert agree(summed, total)


def test_rope_is_the_rotation_of_llama() -> None:
    """x cos + rotate_half(x) sin, cos and sin repeated for both halves; per position, the same for all heads."""
    x, angles = normal(2, 5, 3, 8), normal(5, 4).double()
    cos, sin = (torch.cat([part, part], -1)[None, :, None] for part in (angles.cos(), angles.sin()))
    half = torch.cat([-x[..., 4:], x[..., :4]], -1).double()
    assert agree(golden_of("rope", x, angles.cos(), angles.sin()), x.double() * cos + half * sin)


def test_interleaved_rope_turns_complex_numbers() -> None:
    """Neighbours are real and imaginary part of a number that is multiplied by exp(i angle)."""
    x, angles = normal(2, 5, 3, 8), normal(5, 4).double()
    turned = (
        torch.view_as_complex(x.double().reshape(2, 5, 3, 4, 2))
        * torch.polar(torch.ones(5, 4).double(), angles)[:, None]
    )
    expected = torch.view_as_real(turned).reshape(2, 5, 3, 8)
    assert agree(golden_of("rope", x, angles.cos(), angles.sin(), interleaved=True), expected)


def test_matrix_products() -> None:
    """c_mn = sum_k a_mk b_kn; a linear layer multiplies by the transposed weight and adds the bias."""
    a, b, bias = normal(4, 6), normal(6, 5), normal(5)
    left, right = a.double().tolist(), b.double().tolist()
    product = [[sum(left[m][k] * right[k][n] for k in range(6)) for n in range(5)] for m in range(4)]
    assert agree(golden_of("gemm", a, b), product)
    assert agree(golden_of("linear", a, b.T.contiguous(), bias), F.linear(a.double(), b.T.double(), bias.double()))


@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_scaled_fp8(granularity: str) -> None:
    """Each code times its scale: one for all, one a row of a and a column of b, or one for each 128 along K (and N)."""
    rows, inner, columns = 3, 300, 140
    a, b = normal(rows, inner, dtype=torch.float8_e4m3fn), normal(inner, columns, dtype=torch.float8_e4m3fn)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "tensor": ((), ()), "row": ((rows, 1), (1, columns)), "block": ((rows, 3), (3, 2)),
    }  # fmt: skip
    scale_a, scale_b = (torch.from_numpy(np.asarray(RNG.random(shape))).float() for shape in shapes[granularity])
    left, right = a.double(), b.double()
    for m in range(rows):
        for k in range(inner):
            place = {"tensor": (), "row": (m, 0), "block": (m, k // 128)}[granularity]
            left[m, k] *= scale_a[place].double()
    for k in range(inner):
        for n in range(columns):
            place = {"tensor": (), "row": (0, n), "block": (k // 128, n // 128)}[granularity]
            right[k, n] *= scale_b[place].double()
    assert agree(golden_of("gemm_fp8", a, b, scale_a, scale_b, granularity=granularity), left @ right)


def test_scaled_int8() -> None:
    """The integer product times the scale of its row and that of its column."""
    a, b = (torch.from_numpy(RNG.integers(-128, 128, shape)).to(torch.int8) for shape in ((3, 40), (40, 5)))
    scale_a, scale_b = normal(3, 1).abs(), normal(1, 5).abs()
    integers = a.to(torch.int64) @ b.to(torch.int64)
    expected = integers.double() * scale_a.double() * scale_b.double()
    assert agree(golden_of("gemm_int8", a, b, scale_a, scale_b), expected)


def nibble(word: int, place: int) -> int:
    return (word >> (4 * place)) & 0xF


@pytest.mark.parametrize("packing", ["plain", "awq", "gptq"])
@pytest.mark.parametrize(("inner", "groups"), [(64, 2), (64, 1), (24, 3)])
def test_four_bit_weights_unpacked_by_hand(packing: str, inner: int, groups: int) -> None:
    """Weight (k, n) is (q - z) s: codes two a byte along K, or eight a word along N (AWQ) or K (GPTQ, z - 1 stored)."""
    columns, width = 16, inner // groups
    awq = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that nibble 0, 1, ... of a word belongs to (AutoAWQ's order map)
    if packing == "plain":
        weights, zeros = RNG.integers(0, 256, (inner // 2, columns)), RNG.integers(0, 16, (groups, columns))
    else:
        shape = (inner, columns // 8) if packing == "awq" else (inner // 8, columns)
        weights, zeros = RNG.integers(0, 2**32, shape), RNG.integers(0, 2**32, (groups, columns // 8))
    scales, x = normal(groups, columns).abs(), normal(3, inner)
    dense = torch.zeros(inner, columns, dtype=torch.float64)
    for k in range(inner):
        for n in range(columns):
            if packing == "plain":
                code, zero = nibble(int(weights[k // 2, n]), k % 2), int(zeros[k // width, n])
            elif packing == "awq":
                code, zero = (
                    nibble(int(words[row, n // 8]), awq.index(n % 8))
                    for words, row in ((weights, k), (zeros, k // width))
                )
            else:
                code, zero = nibble(int(weights[k // 8, n]), k % 8), nibble(int(zeros[k // width, n // 8]), n % 8) + 1
            dense[k, n] = (code - zero) * float(scales[k // width, n])
    stored = torch.uint8 if packing == "plain" else torch.int32
    packed = [torch.from_numpy(words.astype(np.uint32).view(np.int32).copy()).to(stored) for words in (weights, zeros)]
    assert agree(golden_of("gemm_int4", x, packed[0], scales, packed[1], packing=packing), x.double() @ dense)
