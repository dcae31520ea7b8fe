"""The copies of 8-bit operands that lie the other way round."""

import pytest
import torch

from assay.kernels.triton.layouts import k_major

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(("k", "n"), [(1, 1), (64, 64), (63, 130), (200, 1), (1, 65)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_operands_lie_along_k(k: int, n: int, dtype: torch.dtype) -> None:
    """Whichever way they lay, stepped and transposed ones too; not a bit is changed."""
    codes = torch.randint(-128, 128, (2 * max(k, 40), 2 * max(n, k)), dtype=torch.int8).view(dtype)
    for a in (codes[:40, :k], codes[:k, :40].t(), codes[:80:2, : 2 * k : 2]):
        for b in (codes[:k, :n], codes[:n, :k].t() if n <= codes.shape[0] else codes[:k, :n], codes[: 2 * k : 2, :n]):
            for before, after, inner in zip((a, b), k_major(a, b), (1, 0), strict=True):
                assert torch.equal(before.view(torch.int8), after.view(torch.int8))
                assert after.stride(inner) == 1 or after.shape[inner] == 1


def test_operands_of_few_rows_stay_as_they_lie() -> None:
    """As the product then doesn't run on wgmma."""
    a, b = torch.zeros(32, 64, dtype=torch.int8), torch.zeros(64, 48, dtype=torch.int8)
    assert k_major(a, b)[1] is b
