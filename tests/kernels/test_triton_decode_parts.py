"""The merge of a sequence's parts."""

import math

import pytest
import torch

from assay.kernels.triton.decode_parts import MOST_SPLITS, empty_parts, merge_parts

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize("splits", [1, 2, 3, 17, 33, MOST_SPLITS])
@pytest.mark.parametrize("width", [5, 128, 512])
def test_parts_are_weighted_by_their_sums(splits: int, width: int) -> None:
    """However many there are: some without keys, and rows that have no key at all, which are zero."""
    out, lse = torch.full((2, 3, width), math.nan), torch.full((2, 3), math.nan)
    parts, part_lse = empty_parts(out, splits)
    parts.copy_(torch.randn(parts.shape))
    part_lse.copy_(8.0 * torch.randn(part_lse.shape))
    part_lse[0, :, 1::2] = -math.inf
    part_lse[1, 1] = -math.inf
    merge_parts(parts, part_lse, out, lse, 0.5)
    base_e = part_lse.double() * math.log(2.0)
    expected = (base_e.softmax(-1).nan_to_num()[..., None] * parts.double()).sum(2) * 0.5
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), base_e.logsumexp(-1), rtol=1e-5, atol=1e-5)
