"""Cases that once lay beyond a radius: honest kernels that were flagged, and digits that were lost."""

import pytest
import torch

from assay.formats.format import format_named
from assay.golden import evaluate, spec
from assay.golden.arithmetic import Ball, BallArithmetic
from assay.verify.contract import Contract
from tests.golden.allowance import rows, uses, worst
from tests.golden.float32 import EXPONENTIALS, Functions


def test_a_bias_that_takes_in_the_mean_is_held() -> None:
    """x (r w) + (b - m r w), as folded layer norms compute it, keeps the contract."""
    x, w, b = rows("peaked", 3, 33), rows("normal", 1, 33)[0], rows("normal", 1, 33, seed=1)[0]
    mean = x.mean(-1, keepdim=True)
    factor = (x.sub(mean).square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w
    y = x * factor + (b - mean * factor)
    assert worst(uses("layernorm", (x, w, b), {}, [("folded", y)])).ratio <= 1


def test_one_scaled_product_is_held() -> None:
    """a b (sa sb) with K = 1, where a sa and b sb happen to be float32 numbers, keeps the contract."""
    a, b = (torch.tensor([[value]]).to(torch.float8_e4m3fn) for value in (1.125, 1.0))
    scale_a, scale_b = torch.tensor(0.6297087669372559), torch.tensor(0.18037541210651398)
    y = (a.float() @ b.float()) * (scale_a * scale_b)
    assert worst(uses("gemm_fp8", (a, b, scale_a, scale_b), {}, [("", y)], dtype="float8_e4m3fn")).ratio <= 1


def test_thirty_digits_of_huge_scores_are_no_nan() -> None:
    """One key of a huge score has weight one: more digits are needed, not NaN."""
    q, k, v = torch.tensor([[[[1.7e38, 9.9e37]]]]), torch.tensor([[[[-3.4e38, -3.4e38]]]]), torch.tensor([[[[1.25]]]])
    golden = evaluate("attention", q, k, v, digits=30)
    assert not isinstance(golden, tuple)
    assert golden.value.item() == 1.25


def test_a_subnormal_product_that_is_multiplied_up_is_held() -> None:
    """(dy up s) (1 + x (1 - s)), whose first factor is subnormal and whose second is -83, keeps the contract."""
    gate, up, dy = (torch.tensor([[value]]) for value in (-84.118286, -1.0, -1.85343083e-06))
    s = torch.sigmoid(gate)
    results = (dy * up * s) * (1 + gate * (1 - s)), dy * (gate * s)
    assert worst(uses("swiglu_backward", (gate, up, dy), {}, [("torch", results)])).ratio <= 1


@pytest.mark.parametrize("scale", [1.0, 30.0, 1000.0])
def test_a_log_sum_exp_moves_no_farther_than_its_numbers(scale: float) -> None:
    """Logits that are stored, and so off by much, leave the loss known: off by as much, not by exp of it."""
    model = Contract().model(spec("logsumexp"), format_named("float32"))
    drawn = torch.Generator().manual_seed(0)
    x = scale * torch.randn(16, 33, generator=drawn)
    off = 2.0**-8 * x.abs() + 0.01
    ball = BallArithmetic(model).logsumexp(Ball(x.double(), off.double(), model))
    assert bool((ball.radius <= 1.01 * off.amax(-1, keepdim=True) + 1e-3).all())
    used = 0.0
    largest = (x == x.amax(-1, keepdim=True)).float()
    for signs in (1.0, -1.0, largest, -largest, torch.randn(x.shape, generator=drawn).sign()):
        y = x + signs * off * (1 - 2.0**-20)
        for name, exponential in EXPONENTIALS.items():
            for sign in (-1, 0, 1):
                f = Functions(sign)
                most = y.amax(-1, keepdim=True)
                found = most + f.log(exponential(f, y, most).sum(-1, keepdim=True))
                use = ((found.double() - torch.logsumexp(x.double(), -1, keepdim=True)).abs() / ball.radius).max()
                assert float(use) <= 1, name
                used = max(used, float(use))
    assert used > 0.9
