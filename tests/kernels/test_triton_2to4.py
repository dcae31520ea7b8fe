"""The Triton product of a two-to-four sparse matrix against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import gemm_2to4 as module
from assay.kernels.triton.gemm_2to4 import gemm_2to4
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def drawn(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Two different places of each four, in either order."""
    places = torch.rand(m, k // 4, 4).argsort(-1)[..., :2].reshape(m, k // 2)
    return torch.randn(m, k // 2).to(dtype), places.byte(), torch.randn(k, n).to(dtype)


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
    """Whichever tile is picked, fitting or not, with several bands of tiles or one, the result is that of float64."""
    monkeypatch.setattr(module._gemm_2to4_kernel, "configs", [config])
    monkeypatch.setattr(module._gemm_2to4_kernel, "early_config_prune", None)
    assert_right(*drawn(*sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_order_of_places(dtype: torch.dtype) -> None:
    """Places may descend; of two values at one place both count, and neither is rounded."""
    values, _, b = drawn(70, 136, 40, dtype)
    assert_right(values, torch.randint(0, 4, values.shape).byte(), b)
    assert_right(values, torch.full(values.shape, 3).byte(), b)


@pytest.mark.parametrize("place", [(0, 0), (69, 66)], ids=str)
def test_one_pair_at_one_place(place: tuple[int, int]) -> None:
    """A single repeated place in a tile is seen, in its first block of K and in its last."""
    values, index, b = drawn(70, 136, 40)
    index[place] = index[place[0], place[1] + 1]
    assert_right(values, index, b)


def test_any_strides() -> None:
    """Transposed, sliced and expanded operands are read where they lie."""
    values, index, b = drawn(70, 88, 40, torch.bfloat16)
    assert_right(values.t().contiguous().t(), index.t().contiguous().t(), b.t().contiguous().t())
    assert_right(values[3:, 4:], index[3:, 4:], b[8:, ::3])
    assert_right(values[:1].expand(40, 44), index[:1].expand(40, 44), b[:, 1:2].expand(88, 9))


@pytest.mark.parametrize("sizes", [(0, 32, 8), (8, 32, 0), (70, 0, 12)], ids=str)
def test_nothing_in_nothing_out(sizes: tuple[int, int, int]) -> None:
    """Without rows or columns the result is empty; a sum of nothing is zero."""
    assert_right(*drawn(*sizes))


def test_a_nan_stays_in_its_row_or_column() -> None:
    """NaN in a stored value reaches its row, NaN in b its column, and no other element."""
    values, index, b = drawn(9, 64, 12)
    values[3, 5] = b[int(4 * 4 + index[2, 8]), 7] = float("nan")
    c = gemm_2to4(values, index, b)
    assert bool(c[3].isnan().all())
    assert bool(c[2, 7].isnan())
    assert not c[torch.arange(9) != 3][:, torch.arange(12) != 7].isnan().any()


def test_an_infinity_comes_out() -> None:
    """An infinity of b that every row names makes infinities of its column, whatever lies beyond the matrices."""
    values, index, b = torch.ones(3, 10), torch.tensor([[0, 1] * 5] * 3).byte(), torch.ones(20, 5)
    b[5, 2] = float("inf")
    expected = torch.full((3, 5), 10.0)
    expected[:, 2] = float("inf")
    assert torch.equal(gemm_2to4(values, index, b), expected)


def test_a_group_along_k_is_whole() -> None:
    """A K that isn't a multiple of four is refused."""
    with pytest.raises(ValueError, match=r"^b: expected K to be a multiple of 4, got K=34$"):
        gemm_2to4(torch.ones(3, 17), torch.zeros(3, 17, dtype=torch.uint8), torch.ones(34, 5))
