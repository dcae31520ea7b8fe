"""The Triton product in MXFP8 against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_mxfp8 as module
from assay.kernels.triton.gemm_mxfp8 import gemm_mxfp8

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(m: int, k: int, n: int) -> tuple[Tensor, ...]:
    """Codes, and scales whose neighbours differ by up to a factor of sixteen."""
    shapes = (m, k // 32), (k // 32, n)
    scales = [(2.0 ** torch.randint(-2, 3, shape)).to(torch.float8_e8m0fnu) for shape in shapes]
    return *(torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((m, k), (k, n))), *scales


def assert_right(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    """Within a rounding of bfloat16, and of float32 for each term."""
    c = gemm_mxfp8(a, b, scale_a, scale_b)
    left = a.double() * scale_a.double().repeat_interleave(32, 1)
    right = b.double() * scale_b.double().repeat_interleave(32, 0)
    exact, size = left @ right, left.abs() @ right.abs()
    assert c.dtype == torch.bfloat16
    assert c.shape == exact.shape
    assert bool(((c.double() - exact).abs() <= 2**-8 * exact.abs() + a.shape[1] * 2**-24 * size).all())


@pytest.mark.parametrize("config", module._CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", [(300, 160, 270), (1200, 32, 200), (3, 288, 5)], ids=str)
def test_every_configuration(config: Any, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tile is picked, fitting or not, with several bands of tiles or one, the result is that of float64."""
    monkeypatch.setattr(module._gemm_mxfp8_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_mxfp8_kernel, "early_config_prune", None)
    assert_right(*drawn(*sizes))


@pytest.mark.parametrize("sizes", [(0, 32, 8), (8, 32, 0), (70, 0, 12)], ids=str)
def test_nothing_in_nothing_out(sizes: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty; a sum of nothing is zero."""
    assert_right(*drawn(*sizes))
