"""Integers that a reference leaves open are no fault of a solution; all others are compared exactly."""

import pytest
import torch

from assay.judge.reference_model import left_open

from .conftest import Judged
from .judged.kernels import RELU, solution

TIES = RELU.replace("return torch.relu(x)", "values, places = torch.topk((x * 4).round(), 3)\n        return places")
ROUNDED = RELU.replace(
    "return torch.relu(x)", "return torch.stack([x.sum(1), x.flip(1).sum(1), 2 * x[:, ::2].sum(1)], 1).argmax(1)"
)
FIRST = RELU.replace("return torch.relu(x)", "return (x * 4).round().argmax(1)")


@pytest.mark.parametrize(
    ("problem", "body", "outcome"),
    [
        (TIES, "return (x * 4).round().sort(dim=1, descending=True, stable=True).indices[:, :3]", "PASS"),
        (TIES, "return x.topk(3).indices.flip(1).roll(1, 0)", "FAIL"),
        (TIES, "return torch.full((x.shape[0], 3), -1)", "FAIL"),
        (
            ROUNDED,
            "w = x.double()\nreturn torch.stack([w.sum(1), w.sum(1), 2 * w[:, ::2].sum(1)], 1).argmax(1)",
            "PASS",
        ),
        (ROUNDED, "return torch.full((x.shape[0],), 2)", "FAIL"),
        (FIRST, "y = (4 * x).round()\nreturn torch.argmax(y, dim=1)", "PASS"),
        (FIRST, "return x.shape[1] - 1 - (x * 4).round().flip(1).argmax(1)", "FAIL"),
    ],
    ids=["stable sort", "other rows", "no index", "other order", "the least", "first", "last"],
)
def test_integers_are_compared_where_the_reference_decides_them(
    judged: Judged, problem: str, body: str, outcome: str
) -> None:
    """Any of several equal numbers, and either of two that rounding tells apart; of argmax's equals the first."""
    verdict = judged(solution(problem, body), problem)
    assert verdict.outcome == outcome, str(verdict)
    if body.startswith("w = "):
        assert any("leaves open" in reason for reason in verdict.left_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_numbers_are_open_and_neighbours_are_not(dtype: torch.dtype) -> None:
    """Of zeros top-k may take any; of two numbers that differ by one unit in the last place only the larger."""
    zeros = torch.zeros(4, 9, dtype=dtype)
    assert bool(left_open(lambda: [zeros.topk(2).indices], [zeros.topk(2).indices])[0].all())
    steps = 1 + torch.arange(9) * torch.finfo(dtype).eps
    apart = torch.stack([steps, -steps, steps * torch.finfo(dtype).tiny]).to(dtype)
    assert not bool(left_open(lambda: [apart.topk(3).indices], [apart.topk(3).indices])[0].any())


def test_what_is_exact_is_not_open() -> None:
    x = torch.arange(-8.0, 8.0).reshape(4, 4)

    def results() -> list[torch.Tensor]:
        y = (x + 1) @ x.T
        return [(y > 0).long(), y.argmax(1), (x / 2).floor().long(), (x / 3 * 3 == x).long()]

    masks = left_open(results, results())
    assert [bool(mask.any()) for mask in masks] == [False, False, False, True]
