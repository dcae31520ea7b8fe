"""The Triton routing of a mixture of experts against torch in float64, and its sort of pairs against torch's."""

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import moe_route as module
from assay.kernels.triton import moe_sort
from assay.kernels.triton.moe_route import moe_route
from assay.kernels.triton.moe_sort import sort_by_expert
from tests.kernels.conftest import every_configuration
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

NAN, INF = float("nan"), float("inf")


def assert_right(logits: Tensor, top_k: int, renormalize: bool = True, scoring: str = "softmax") -> None:
    weights, ids = moe_route(logits, top_k=top_k, renormalize=renormalize, scoring=scoring)
    expected, best = reference("moe_route")(logits, top_k, renormalize, scoring)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, best)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-9)


@every_configuration(module._moe_route_kernel)
@pytest.mark.parametrize("shape", [(700, 17), (3, 300), (2, 9000)], ids=str)
def test_every_configuration(configured: None, shape: tuple[int, int]) -> None:
    logits = torch.randn(shape)
    assert_right(logits, 5)
    assert_right(logits, 1, False)
    assert_right(logits, 8, True, "sigmoid")
    assert_right(logits, 3, False, "sigmoid")


def test_any_strides() -> None:
    logits = torch.randn(70, 90)
    for view in (logits.t(), logits[3:, ::2], logits[:1].expand(40, 90), logits[:, 1:2].expand(70, 9)):
        assert_right(view, 4, False)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [1, 2, 3, 33])
def test_all_experts_may_be_chosen(experts: int, scoring: str) -> None:
    """With top_k = E every expert is chosen once, and normalised weights add up to one."""
    logits = torch.randn(9, experts)
    assert_right(logits, experts, False, scoring)
    weights, ids = moe_route(logits, top_k=experts, scoring=scoring)
    assert torch.equal(ids.sort(-1).values, torch.arange(experts, dtype=torch.int32).expand(9, experts))
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_equal_logits_are_chosen_by_index() -> None:
    """The lower index first; both zeros are equal, and so are infinities."""
    logits = torch.tensor([[0.0, -0.0, 0.0, -1.0], [-0.0, 1.0, 0.0, 1.0], [-INF, 2.0, -INF, -INF]])
    assert moe_route(logits, top_k=3)[1].tolist() == [[0, 1, 2], [1, 3, 0], [1, 0, 2]]
    assert moe_route(torch.zeros(3, 200, dtype=torch.float16), top_k=5)[1].tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_propagates(scoring: str) -> None:
    """A NaN of either sign is chosen first; experts stay distinct, and a clean row stays clean."""
    logits = torch.tensor([[INF, 1.0, -NAN, 2.0], [NAN, NAN, 0.0, NAN], [0.0, 1.0, 2.0, 3.0]])
    weights, ids = moe_route(logits, top_k=3, scoring=scoring)
    assert ids.tolist() == [[2, 0, 3], [0, 1, 3], [3, 2, 1]]
    assert weights[:2].isnan().all()
    assert weights[2].isfinite().all()


def test_scores_that_underflow_keep_their_weights() -> None:
    """Normalised sigmoids are right where every score by itself would be zero in float32, or one."""
    logits = torch.tensor([[-300.0, -301.0, -400.0], [300.0, 200.0, -300.0], [-90.0, -89.0, -88.0]])
    assert_right(logits, 2, True, "sigmoid")
    assert_right(logits, 3, True, "sigmoid")
    assert_right(logits, 3, False, "softmax")


def test_no_tokens() -> None:
    weights, ids = moe_route(torch.empty(0, 5), top_k=3)
    assert (weights.shape, weights.dtype) == ((0, 3), torch.float32)
    assert (ids.shape, ids.dtype) == ((0, 3), torch.int32)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    [
        *((1, 1, 1), (1, 6, 64), (40, 3, 7), (64, 2, 5000)),  # in one launch
        *((129, 1, 5), (3000, 2, 3), (700, 8, 130), (70, 2, 5000), (2100, 1, 1)),
    ],
)
def test_pairs_are_sorted_and_cut_into_blocks(tokens: int, top_k: int, experts: int) -> None:
    """The sort is stable; blocks hold each row once, of one expert, and are full except an expert's last."""
    ids = torch.randint(0, experts, (top_k, tokens)).to(torch.int32).t().contiguous()
    ids[::3] = experts - 1  # uneven
    routing = sort_by_expert(ids, experts)
    pairs, schedule = routing.sorted_pairs, routing.block_schedule
    flat = ids.reshape(-1)
    assert torch.equal(pairs, flat.argsort(stable=True))
    used = schedule[schedule[:, 1] < schedule[:, 2]]
    rows = torch.cat([torch.arange(int(first), int(end)) for _, first, end in used])
    assert torch.equal(rows, torch.arange(tokens * top_k))
    for expert, first, end in used.tolist():
        assert (flat[pairs[first:end]] == expert).all()
        assert end - first == routing.block_m or end == tokens * top_k or flat[pairs[end]] != expert
    assert (used[:, 2] - used[:, 1] <= routing.block_m).all()


def test_there_are_blocks_for_the_worst_division() -> None:
    """Experts whose last block holds one row need all of the schedule."""
    ids = torch.cat([torch.arange(4).repeat_interleave(33), torch.arange(4, 64)]).to(torch.int32)[:, None]
    routing = sort_by_expert(ids, 64)
    schedule = routing.block_schedule
    assert routing.block_m == 16
    assert int((schedule[:, 2] - schedule[:, 1]).clamp(min=0).sum()) == len(ids)
    assert len(schedule) == (len(ids) + 64 * 15) // 16
    assert int((schedule[:, 1] < schedule[:, 2]).sum()) == 4 * 3 + 60


def test_ids_of_no_expert_are_in_no_block() -> None:
    ids = torch.tensor([[-1, 2], [7, 0], [2, -(2**31)], [3, 2**31 - 1]], dtype=torch.int32)
    routing = sort_by_expert(ids, 3)
    schedule = routing.block_schedule
    assert schedule[schedule[:, 1] < schedule[:, 2]].tolist() == [[0, 0, 1], [2, 1, 3]]
    assert routing.sorted_pairs[:3].tolist() == [3, 1, 4]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (1, 8, 256), (127, 1, 3), (64, 2, 40)])
def test_both_sorts_agree(monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, experts: int) -> None:
    """Bit for bit, with ids of no expert and experts without rows."""
    ids = torch.randint(-1, experts + 1, (tokens, top_k)).to(torch.int32)
    ids[ids == experts // 2] = 0
    one_launch = sort_by_expert(ids, experts, 32)
    monkeypatch.setattr(moe_sort, "_MAX_PAIRS_OF_ONE_LAUNCH", 0)
    counting = sort_by_expert(ids, experts, 32)
    assert one_launch.block_m == counting.block_m
    assert torch.equal(one_launch.expert_ends, counting.expert_ends)
    assert torch.equal(one_launch.block_schedule, counting.block_schedule)
    rows = slice(int(counting.expert_ends[-1]))
    assert torch.equal(one_launch.sorted_pairs[rows], counting.sorted_pairs[rows])


@pytest.mark.parametrize(("pairs", "other"), [(128, "_counting_sort"), (129, "_sort_in_one_launch")])
def test_one_launch_sorts_up_to_128_pairs(monkeypatch: pytest.MonkeyPatch, pairs: int, other: str) -> None:
    monkeypatch.setattr(moe_sort, other, lambda *_: pytest.fail(f"{pairs} pairs reached {other}"))
    ids = (torch.arange(pairs) % 3 // 2)[:, None].to(torch.int32)
    routing = sort_by_expert(ids, 4)
    assert torch.equal(routing.sorted_pairs, ids.flatten().argsort(stable=True))
    assert routing.expert_ends.tolist() == [pairs - pairs // 3, pairs, pairs, pairs]
