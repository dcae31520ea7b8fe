"""The block-scaled Triton GEMMs, MXFP8 and NVFP4, against float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_scaled
from assay.kernels.triton.gemm_scaled import gemm_mxfp8, gemm_nvfp4
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

E4M3 = torch.float8_e4m3fn
Drawn = tuple[Tensor, ...]


def drawn_mxfp8(m: int, k: int, n: int) -> tuple[Drawn, Drawn]:
    """Codes, and scales whose neighbours differ by up to a factor of sixteen; and the same without signs."""
    shapes = (m, k // 32), (k // 32, n)
    scales = [(2.0 ** torch.randint(-2, 3, shape)).to(torch.float8_e8m0fnu) for shape in shapes]
    a, b = (torch.randn(shape).to(E4M3) for shape in ((m, k), (k, n)))
    return (a, b, *scales), (a.float().abs(), b.float().abs(), *scales)


def drawn_nvfp4(m: int, k: int, n: int) -> tuple[Drawn, Drawn]:
    """Any codes, scales of every binade but the last, and inexact global scales; and without signs."""
    scales = [(2.0 ** torch.randint(-8, 8, (rows, k // 16)) * 1.75).to(E4M3) for rows in (m, n)]
    a, b = (torch.randint(0, 256, (rows, k // 2)).byte() for rows in (m, n))
    global_scales = torch.tensor(0.3), torch.tensor(1.1)
    return (a, b, *scales, *global_scales), (a & 0x77, b & 0x77, *scales, *global_scales)


EVERY = pytest.mark.parametrize(("kernel", "drawn"), [(gemm_mxfp8, drawn_mxfp8), (gemm_nvfp4, drawn_nvfp4)])
Kernel = Callable[..., Tensor]


def assert_right(kernel: Kernel, signed: Drawn, absolute: Drawn) -> None:
    """Within a rounding of bfloat16, and of float32 for each term and global scale."""
    c = kernel(*signed)
    exact, size = (reference(kernel.__name__)(*tensors)[0] for tensors in (signed, absolute))
    terms = 2 * signed[0].shape[1] + 4
    assert c.dtype == torch.bfloat16
    assert c.shape == exact.shape
    assert bool(((c.double() - exact).abs() <= 2**-8 * exact.abs() + terms * 2**-24 * size).all())


@EVERY
@pytest.mark.parametrize("config", range(8))
@pytest.mark.parametrize("sizes", [(300, 160, 270), (1200, 32, 200), (3, 288, 5)], ids=str)
def test_every_configuration(
    kernel: Kernel,
    drawn: Callable[..., Any],
    config: int,
    sizes: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    autotuner = getattr(gemm_scaled, f"_{kernel.__name__}_kernel")
    assert len(autotuner.configs) == 8
    monkeypatch.setattr(autotuner, "configs", [autotuner.configs[config]])
    monkeypatch.setattr(autotuner, "early_config_prune", None)
    assert_right(kernel, *drawn(*sizes))


@EVERY
@pytest.mark.parametrize("sizes", [(0, 32, 8), (8, 32, 0), (70, 0, 12)], ids=str)
def test_nothing_in_nothing_out(kernel: Kernel, drawn: Callable[..., Any], sizes: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty; with K = 0 it is zero."""
    assert_right(kernel, *drawn(*sizes))


@EVERY
@pytest.mark.parametrize("rows", [5, 70], ids=str)
def test_any_strides(kernel: Kernel, drawn: Callable[..., Any], rows: int) -> None:
    signed, absolute = drawn(rows, 96, 40)
    transposed = tuple(x.t().contiguous().t() if x.dim() == 2 else x for x in signed)
    assert_right(kernel, transposed, absolute)
    assert torch.equal(kernel(*transposed), kernel(*signed))


def test_a_nan_scale_stays_in_its_row() -> None:
    (a, b, scale_a, scale_b, *global_scales), _ = drawn_nvfp4(5, 32, 7)
    scale_a.view(torch.uint8)[3, 1] = 0x7F
    c = gemm_nvfp4(a, b, scale_a, scale_b, *global_scales)
    assert torch.equal(c.isnan().any(1), torch.arange(5) == 3)
    assert bool(c[3].isnan().all())


def test_large_global_scales_may_cancel() -> None:
    """A sum times 2^100 and 2^-100 is the sum: global scales aren't rounded to bfloat16."""
    (a, b, scale_a, scale_b, *_), _ = drawn_nvfp4(5, 32, 7)
    large, one = torch.tensor(2.0**100), torch.tensor(1.0)
    given = gemm_nvfp4(a, b, scale_a, scale_b, large, 1 / large)
    assert torch.equal(given, gemm_nvfp4(a, b, scale_a, scale_b, one, one))


@pytest.mark.parametrize(("kernel", "drawn", "k"), [(gemm_mxfp8, drawn_mxfp8, 48), (gemm_nvfp4, drawn_nvfp4, 24)])
def test_k_must_be_a_multiple_of_the_group(kernel: Kernel, drawn: Callable[..., Any], k: int) -> None:
    with pytest.raises(ValueError, match=f"^a: expected K to be a multiple of .., got K={k}$"):
        kernel(*drawn(5, k, 7)[0])
