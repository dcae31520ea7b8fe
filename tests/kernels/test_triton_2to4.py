"""The Triton GEMM with a 2:4 sparse operand against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_2to4 as module
from assay.kernels.triton.gemm_2to4 import gemm_2to4
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Two different indices in each group of four, in either order."""
    index = torch.rand(m, k // 4, 4).argsort(-1)[..., :2].reshape(m, k // 2)
    return torch.randn(m, k // 2).to(dtype), index.byte(), torch.randn(k, n).to(dtype)


def assert_right(values: Tensor, index: Tensor, b: Tensor) -> None:
    """Within a rounding of the output, and of float32 for each term."""
    c = gemm_2to4(values, index, b)
    exact, size = (reference("gemm_2to4")(x, index, y)[0] for x, y in ((values, b), (values.abs(), b.abs())))
    assert c.dtype == values.dtype
    assert c.shape == exact.shape
    unit = torch.finfo(c.dtype).eps
    assert bool(((c.double() - exact).abs() <= unit * exact.abs() + b.shape[0] * 2**-24 * size).all())


@pytest.mark.parametrize("config", module._CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", [(300, 140, 270), (1200, 4, 200), (3, 300, 5)], ids=str)
def test_every_configuration(config: Any, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._gemm_2to4_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_2to4_kernel, "early_config_prune", None)
    assert_right(*drawn(*sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_index_order(dtype: torch.dtype) -> None:
    """Indices may descend; two values at one index both count, and neither is rounded."""
    values, _, b = drawn(70, 136, 40, dtype)
    assert_right(values, torch.randint(0, 4, values.shape).byte(), b)
    assert_right(values, torch.full(values.shape, 3).byte(), b)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (69, 66)])
def test_one_repeated_index(row: int, column: int) -> None:
    """One in a tile, in its first block of K or its last."""
    values, index, b = drawn(70, 136, 40)
    index[row, column] = index[row, column + 1]
    assert_right(values, index, b)


def test_any_strides() -> None:
    values, index, b = drawn(70, 88, 40, torch.bfloat16)
    assert_right(values.t().contiguous().t(), index.t().contiguous().t(), b.t().contiguous().t())
    assert_right(values[3:, 4:], index[3:, 4:], b[8:, ::3])
    assert_right(values[:1].expand(40, 44), index[:1].expand(40, 44), b[:, 1:2].expand(88, 9))


@pytest.mark.parametrize("sizes", [(0, 32, 8), (8, 32, 0), (70, 0, 12)], ids=str)
def test_nothing_in_nothing_out(sizes: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty; with K = 0 it is zero."""
    assert_right(*drawn(*sizes))


def test_a_nan_stays_in_its_row_or_column() -> None:
    """NaN in a stored value reaches its row, NaN in b its column, and no other element."""
    values, index, b = drawn(9, 64, 12)
    values[3, 5] = b[int(4 * 4 + index[2, 8]), 7] = float("nan")
    c = gemm_2to4(values, index, b)
    assert bool(c[3].isnan().all())
    assert bool(c[2, 7].isnan())
    assert not c[torch.arange(9) != 3][:, torch.arange(12) != 7].isnan().any()


def test_an_infinity_stays_in_its_column() -> None:
    """Where each row multiplies it; masked loads make no NaN of it."""
    values, index, b = torch.ones(3, 10), torch.tensor([[0, 1] * 5] * 3).byte(), torch.ones(20, 5)
    b[5, 2] = float("inf")
    expected = torch.full((3, 5), 10.0)
    expected[:, 2] = float("inf")
    assert torch.equal(gemm_2to4(values, index, b), expected)


def test_k_must_be_a_multiple_of_four() -> None:
    with pytest.raises(ValueError, match=r"^b: expected K to be a multiple of 4, got K=34$"):
        gemm_2to4(torch.ones(3, 17), torch.zeros(3, 17, dtype=torch.uint8), torch.ones(34, 5))
