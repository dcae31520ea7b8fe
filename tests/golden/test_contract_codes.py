"""The default contract holds honest float32 quantisers, microscaled and sparse products, and merges; not coarser ones.

Largest share of the radius that any of them used: gemm_mxfp8 0.07, gemm_nvfp4 0.07, gemm_2to4 0.32, merge_states 0.36.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from assay.formats.format import format_named
from assay.formats.rounding import round_to
from assay.golden import spec
from assay.golden.arithmetic import BallArithmetic
from assay.golden.evaluation.call import run
from assay.golden.evaluation.golden import golden_of
from assay.verify.contract import Contract
from tests.golden.allowance import KINDS, Use, codes, report, rows, uses, worst
from tests.golden.float32 import Functions, fma
from tests.golden.honest_products import DOTS
from tests.golden.honest_scans import merges

Tensor = torch.Tensor
FORMATS = {"quantize_fp8": ("float8_e4m3fn", 448.0), "quantize_int8": ("int8", 127.0)}


def quotients(f: Functions, x: Tensor, largest: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Scales and quotients, by divisions as bad as the contract lets them be, or by products with reciprocals."""
    amax = x.abs().amax(-1, keepdim=True)
    for how, scale in (("amax / n", f.divide(amax, torch.tensor(largest))), ("amax (1 / n)", amax * (1 / largest))):
        safe = torch.where(scale == 0, 1.0, scale)
        yield f"{how}, x / s", scale, f.divide(x, safe)
        yield f"{how}, x (1 / s)", scale, x * f.reciprocal(safe)
        factor = torch.where(
            amax == 0, 0.0, f.divide(torch.full_like(amax, largest), torch.where(amax == 0, 1.0, amax))
        )
        yield f"{how}, x (n / amax)", scale, x * factor


def allowed(op: str, x: Tensor, scale: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The least and the largest codes and scales under the default contract, of a kernel that gave this scale."""
    model = Contract().model(spec(op), format_named("float32"))
    parts = run(spec(op), BallArithmetic(model), [x], {}, {"scale": scale})
    goldens = [golden_of(part) for part in parts]
    return [(golden.value - golden.radius, golden.value + golden.radius) for golden in goldens]


@pytest.mark.parametrize("op", FORMATS)
def test_honest_quantisers_keep_the_contract(op: str) -> None:
    """However they divide, and however badly: the scale within its radius, the codes within the hull."""
    format, largest = FORMATS[op]
    tipped = 0
    for place, kind in enumerate(KINDS):
        for divisor in (1.0, 3.0, 1.7):
            x = rows(kind, 4, 40, seed=place) / divisor
            for sign in (0, 1, -1):
                for name, scale, quotient in quotients(Functions(sign), x, largest):
                    codes = round_to(quotient.double(), format, overflow="saturate")
                    (low, high), (least, most) = allowed(op, x, scale)
                    where = f"{op} {kind} / {divisor}, {name}, {sign}"
                    assert bool(((codes >= low) & (codes <= high)).all()), where
                    assert bool(((scale.double() >= least) & (scale.double() <= most)).all()), where
                    tipped += int((low != high).sum())
    assert tipped > 20  # some lay next to midpoints


@pytest.mark.parametrize("op", FORMATS)
def test_hulls_are_sharp(op: str) -> None:
    """Of ordinary numbers fewer than one in a thousand may have another code."""
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((50, 400))).float()
    (low, high), _ = allowed(op, x, x.abs().amax(-1, keepdim=True) / FORMATS[op][1])
    assert float((low != high).double().mean()) < 1e-3


def blockwise(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, block: int) -> Iterator[tuple[str, Tensor]]:
    """a[M,K] b[K,N] and scales [M,K/block], [K/block,N]: dequantised first, or each block's sum scaled."""
    left, right = sa.repeat_interleave(block, 1), sb.repeat_interleave(block, 0)
    for name, dot in DOTS.items():
        yield f"dequantised, {name}", dot(a * left, b * right)
        total = fused = torch.zeros(a.shape[0], b.shape[1])
        for g in range(sa.shape[1]):
            k = slice(g * block, (g + 1) * block)
            part, scale = dot(a[:, k], b[k]), sa[:, g, None] * sb[g]
            total, fused = total + part * sa[:, g, None] * sb[g], fma(part, scale, fused)
        yield f"blocks scaled, {name}", total
        yield f"blocks scaled, fused, {name}", fused


def test_honest_microscaled_products_keep_the_contract(record_property: Any) -> None:
    """Scales before the product or after each block, with e8m0 and e4m3 scales, multipliers early and late."""
    found: list[Use] = []
    for inner in (32, 96):
        a, b = (codes(*shape, 1).view(torch.float8_e4m3fn) for shape in ((3, inner), (inner, 4)))
        sa, sb = (codes(*s, 2).clamp(100, 150).view(torch.float8_e8m0fnu) for s in ((3, inner // 32), (inner // 32, 4)))
        results = list(blockwise(a.float(), b.float(), sa.float(), sb.float(), 32))
        found += uses("gemm_mxfp8", (a, b, sa, sb), {}, results, dtype="float8_e4m3fn", where=f"K = {inner}")
    report("gemm_mxfp8", found, record_property)
    found = []
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for inner in (16, 96):
        a, b = codes(3, inner // 2, 3), codes(4, inner // 2, 4)
        sa, sb = (
            (torch.from_numpy(np.random.default_rng(rows_).random((rows_, inner // 16))) + 0.1).to(torch.float8_e4m3fn)
            for rows_ in (3, 4)
        )
        ga, gb = torch.tensor(0.3), torch.tensor(1.7)
        left, right = (table[torch.stack([x & 15, x >> 4], -1).reshape(len(x), inner).long()] for x in (a, b))
        results = []
        for name, y in blockwise(left, right.T, sa.float(), sb.float().T, 16):
            results += [(f"{name}, late", y * (ga * gb)), (f"{name}, one by one", y * ga * gb)]
        results += [
            (f"early {name}", y) for name, y in blockwise(left, right.T, sa.float() * ga, sb.float().T * gb, 16)
        ]
        found += uses("gemm_nvfp4", (a, b, sa, sb, ga, gb), {}, results, dtype="uint8", where=f"K = {inner}")
    report("gemm_nvfp4", found, record_property)


def test_honest_sparse_products_keep_the_contract(record_property: Any) -> None:
    """Zeros filled in, or rows of b gathered, in any order: within gamma of the K/2 values that are stored."""
    found: list[Use] = []
    rng = np.random.default_rng(7)
    index = torch.tensor(np.array([sorted(rng.choice(4, 2, replace=False)) for _ in range(18)]).reshape(3, 12))
    place = torch.arange(12) // 2 * 4 + index
    for kind, other in zip(KINDS, (*KINDS[3:], *KINDS[:3]), strict=True):
        values, b = rows(kind, 3, 12), rows(other, 4, 24, seed=1).T.contiguous()
        dense = torch.zeros(3, 24).scatter_(1, place, values)
        results = [(f"filled in, {name}", dot(dense, b)) for name, dot in DOTS.items()]
        for name, dot in DOTS.items():
            gathered = torch.cat([dot(values[m : m + 1], b[place[m]]) for m in range(3)])
            results.append((f"gathered, {name}", gathered))
        tensors = (values, index.to(torch.uint8), b)
        found += uses("gemm_2to4", tensors, {}, results, where=f"{kind} by {other}")
    report("gemm_2to4", found, record_property)


def test_honest_merges_keep_the_contract(record_property: Any) -> None:
    """Any base and any association, functions as bad as allowed, log-sum-exps near, far and large."""
    found: list[Use] = []
    for place, kind in enumerate(KINDS):
        oa, ob = (rows(kind, 4, 6, seed=seed).reshape(2, 2, 6) for seed in (1, 2))
        for spread, mean in ((1.0, 0.0), (20.0, 0.0), (0.5, 3000.0), (1.0, -80.0)):
            la, lb = (rows("normal", 2, 2, seed=seed) * spread + mean for seed in (place, place + 50))
            sign = (0, 1, -1)[place % 3]
            where = f"{kind}, {spread}, {mean}, {sign}"
            found += uses("merge_states", (oa, la, ob, lb), {}, merges(Functions(sign), oa, la, ob, lb), where=where)
    report("merge_states", found, record_property)


def test_coarser_evaluations_break_the_contract() -> None:
    """Merged in bfloat16, sums over ranks rounded at each hop, sparse products in TF32: beyond the radius."""
    oa, ob = rows("normal", 4, 16).reshape(2, 2, 16), rows("normal", 4, 16, seed=2).reshape(2, 2, 16)
    la, lb = rows("normal", 2, 2), rows("normal", 2, 2, seed=3)
    share = torch.sigmoid(la - lb)[..., None].bfloat16().float()
    lse = torch.logaddexp(la, lb)
    coarse = uses("merge_states", (oa, la, ob, lb), {}, [("shares", (share * oa + (1 - share) * ob, lse))])
    assert worst(coarse).ratio > 2
    shards = rows("normal", 8, 64)
    total = shards[0]
    for shard in shards[1:]:
        total = (total + shard).bfloat16().float()
    assert worst(uses("all_reduce", (shards,), {}, [("hops", total)])).ratio > 2
    assert worst(uses("all_reduce", (shards,), {}, [("float32", shards.sum(0))])).ratio <= 1


def test_hops_in_bfloat16_are_within_a_contract_that_says_so() -> None:
    """accumulate="bfloat16" allows what the default contract does not."""
    shards = rows("normal", 8, 64).bfloat16().float()
    total = shards[0]
    for shard in shards[1:]:
        total = (total + shard).bfloat16().float()
    exact = [math.fsum(column) for column in shards.double().T.tolist()]
    for contract, kept in ((Contract(), False), (Contract(accumulate="bfloat16"), True)):
        model = contract.model(spec("all_reduce"), format_named("bfloat16"))
        ball = golden_of(run(spec("all_reduce"), BallArithmetic(model), [shards], {})[0])
        off = (total.double() - torch.tensor(exact, dtype=torch.float64)).abs()
        assert bool((off <= ball.radius).all()) is kept
