"""Pairs sorted by expert, and their blocks, against torch's stable sort."""

from collections.abc import Iterator

import pytest
import torch

from assay.interpreter import faithful
from assay.kernels.triton import moe_sort
from assay.kernels.triton.moe_sort import sort_by_expert


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"),
    [
        *((1, 1, 1), (1, 6, 64), (40, 3, 7), (64, 2, 5000)),  # by one launch
        *((129, 1, 5), (3000, 2, 3), (700, 8, 130), (70, 2, 5000), (2100, 1, 1)),
    ],
)
def test_sorted_and_divided(tokens: int, choices: int, experts: int) -> None:
    """The order is the stable one; blocks hold each row once, of one expert, and are full but for an expert's last."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts, (choices, tokens), generator=random).to(torch.int32).t().contiguous()
    ids[::3] = experts - 1  # uneven
    found = sort_by_expert(ids, experts)
    order, blocks, height = found.sorted_pairs, found.block_schedule, found.block_m
    flat = ids.reshape(-1)
    assert torch.equal(order, flat.argsort(stable=True))
    used = blocks[blocks[:, 1] < blocks[:, 2]]
    rows = torch.cat([torch.arange(int(first), int(end)) for _, first, end in used])
    assert torch.equal(rows, torch.arange(tokens * choices))
    for expert, first, end in used.tolist():
        assert (flat[order[first:end]] == expert).all()
        full = end - first == height
        assert full or end == tokens * choices or flat[order[end]] != expert
    assert (used[:, 2] - used[:, 1] <= height).all()


def test_there_are_blocks_for_the_worst_division() -> None:
    """Experts whose last block holds one row need as many blocks as there are."""
    pairs, experts = 33 * 4 + 60, 64
    ids = torch.cat([torch.arange(4).repeat_interleave(33), torch.arange(4, 64)]).to(torch.int32)[:, None]
    found = sort_by_expert(ids, experts)
    blocks = found.block_schedule
    assert found.block_m == 16
    assert int((blocks[:, 2] - blocks[:, 1]).clamp(min=0).sum()) == pairs
    assert blocks.shape[0] == (pairs + 64 * 15) // 16
    assert int((blocks[:, 1] < blocks[:, 2]).sum()) == 4 * 3 + 60


def test_ids_of_no_expert_are_in_no_block() -> None:
    """Ids below zero or beyond the last expert leave the others' rows as they would be without them."""
    ids = torch.tensor([[-1, 2], [7, 0], [2, -(2**31)], [3, 2**31 - 1]], dtype=torch.int32)
    found = sort_by_expert(ids, 3)
    order, blocks = found.sorted_pairs, found.block_schedule
    used = blocks[blocks[:, 1] < blocks[:, 2]]
    assert used.tolist() == [[0, 0, 1], [2, 1, 3]]
    assert order[:3].tolist() == [3, 1, 4]


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (1, 8, 256), (127, 1, 3), (64, 2, 40)])
def test_few_pairs_are_sorted_as_many_are(
    monkeypatch: pytest.MonkeyPatch, tokens: int, choices: int, experts: int
) -> None:
    """One launch gives the bits that three give, with ids of no expert and experts without rows."""
    random = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts + 1, (tokens, choices), generator=random).to(torch.int32)
    ids[ids == experts // 2] = 0
    few = sort_by_expert(ids, experts, 32)
    monkeypatch.setattr(moe_sort, "_MAX_PAIRS_OF_ONE_LAUNCH", 0)
    many = sort_by_expert(ids, experts, 32)
    assert few.block_m == many.block_m
    assert torch.equal(few.expert_ends, many.expert_ends)
    assert torch.equal(few.block_schedule, many.block_schedule)
    assert torch.equal(few.sorted_pairs[: few.expert_ends[-1]], many.sorted_pairs[: many.expert_ends[-1]])


@pytest.mark.parametrize(("pairs", "other"), [(128, "_counting_sort"), (129, "_sort_in_one_launch")])
def test_128_pairs_are_few(monkeypatch: pytest.MonkeyPatch, pairs: int, other: str) -> None:
    """So many are sorted by one launch, and one more by the several: pairs of one expert stay in their order."""
    monkeypatch.setattr(moe_sort, other, lambda *_: pytest.fail(f"{pairs} pairs reached {other}"))
    ids = (torch.arange(pairs) % 3 // 2)[:, None].to(torch.int32)
    found = sort_by_expert(ids, 4)
    assert torch.equal(found.sorted_pairs, ids.flatten().argsort(stable=True))
    assert found.expert_ends.tolist() == [pairs - pairs // 3, pairs, pairs, pairs]
