"""Sums over rows, which the gradients of norms' weights are: part by part, the parts in runs."""

import pytest
import torch
import torch.nn.functional as F

from assay.kernels.triton.layernorm import layernorm_backward
from assay.kernels.triton.norm_backward import rows_per_partial
from assay.kernels.triton.reduction import sum_partials
from assay.kernels.triton.rmsnorm import rmsnorm_backward

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("count", [0, 1, 31, 33, 256, 257, 288, 300, 9000])
@pytest.mark.parametrize("columns", [0, 1, 130])
def test_every_part_is_added_once(count: int, columns: int) -> None:
    """However many there are: whole numbers, whose sums are exact."""
    parts = torch.randint(-8, 9, (count, columns)).float()
    y = torch.full((columns,), 7.0)
    sum_partials(parts, y)
    assert torch.equal(y, parts.sum(0))


@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (1, 1), (300, 64), (70, 600), (9, 4097), (3, 8192), (3, 8193)])
def test_weights_have_gradients_of_rows_of_any_length(rows: int, columns: int) -> None:
    """Of rows that come many to a tile and to a part, of a tile each, and of longer ones."""
    x, dy = torch.randn(rows, columns) + 1.0, torch.randn(rows, columns)
    weight, bias = (torch.randn(columns) for _ in range(2))
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    for right, found in (
        (F.layer_norm(leaves[0], [columns], *leaves[1:], 1e-5), layernorm_backward(x, weight, dy)),
        (F.rms_norm(leaves[0], [columns], leaves[1], 1e-6), rmsnorm_backward(x, weight, dy)),
    ):
        expected = torch.autograd.grad(right, leaves[: len(found)], dy.double())
        for each, gradient in zip(found, expected, strict=True):
            torch.testing.assert_close(each.double(), gradient, rtol=2e-5, atol=2e-5)


def test_rows_behind_the_last_add_nothing() -> None:
    """With an eps of zero their root is infinite, and zero times that is NaN."""
    x, dy = torch.randn(5, 37), torch.randn(5, 37)
    _, dweight = rmsnorm_backward(x, torch.ones(37), dy, eps=0.0)
    torch.testing.assert_close(dweight, (dy * F.rms_norm(x, [37], eps=0.0)).sum(0), rtol=2e-5, atol=2e-5)


def test_the_shape_alone_decides_of_parts() -> None:
    """Whole tiles of short rows, at most 512 parts of many rows, and none of long rows."""
    expected = {(5, 64): 128, (70000, 64): 256, (4096, 4096): 8, (8, 8192): 1, (8, 8193): 0, (8, 0): 8192}
    assert {shape: rows_per_partial(torch.empty(shape)) for shape in expected} == expected
