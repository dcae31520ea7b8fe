"""The Triton routing kernel: arguments, registration, and a few cases against torch in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import moe_route as module
from assay.kernels.triton.moe_route import moe_route
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")

NAN, INF = float("nan"), float("inf")


def assert_right(logits: Tensor, top_k: int, renormalize: bool = True, scoring: str = "softmax") -> None:
    weights, ids = moe_route(logits, top_k=top_k, renormalize=renormalize, scoring=scoring)
    expected, best = reference("moe_route")(logits, top_k, renormalize, scoring)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, best)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("config", module._CONFIGS, ids=lambda config: f"{config.kwargs['TILE']}-{config.num_warps}")
@pytest.mark.parametrize("shape", [(700, 17), (3, 300), (2, 9000)], ids=str)
def test_every_configuration(config: Any, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever configuration tuning picks, for any number of experts, the results are those of float64."""
    monkeypatch.setattr(module._moe_route_kernel, "configs", [config])
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert_right(logits, 5)
    assert_right(logits, 1, False)
    assert_right(logits, 8, True, "sigmoid")
    assert_right(logits, 3, False, "sigmoid")


def test_any_strides() -> None:
    """Transposed, sliced with a step, and expanded logits are read where they lie."""
    logits = torch.randn(70, 90)
    for view in (logits.t(), logits[3:, ::2], logits[:1].expand(40, 90), logits[:, 1:2].expand(70, 9)):
        assert_right(view, 4, False)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [1, 2, 3, 33])
def test_all_experts_may_be_chosen(experts: int, scoring: str) -> None:
    """With top_k = E every expert comes once, in falling order, and normalised weights add up to one."""
    logits = torch.randn(9, experts)
    assert_right(logits, experts, False, scoring)
    weights, ids = moe_route(logits, top_k=experts, scoring=scoring)
    assert torch.equal(ids.sort(-1).values, torch.arange(experts, dtype=torch.int32).expand(9, experts))
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_equal_logits_come_by_index() -> None:
    """The lower index first; both zeros are equal, and so are infinities."""
    logits = torch.tensor([[0.0, -0.0, 0.0, -1.0], [-0.0, 1.0, 0.0, 1.0], [-INF, 2.0, -INF, -INF]])
    assert moe_route(logits, top_k=3)[1].tolist() == [[0, 1, 2], [1, 3, 0], [1, 0, 2]]
    assert moe_route(torch.zeros(3, 200, dtype=torch.float16), top_k=5)[1].tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_nan_is_seen(scoring: str) -> None:
    """A NaN of either sign is chosen first, at its place; experts stay distinct, and a clean row stays clean."""
    logits = torch.tensor([[INF, 1.0, -NAN, 2.0], [NAN, NAN, 0.0, NAN], [0.0, 1.0, 2.0, 3.0]])
    weights, ids = moe_route(logits, top_k=3, scoring=scoring)
    assert ids.tolist() == [[2, 0, 3], [0, 1, 3], [3, 2, 1]]
    assert weights[:2].isnan().all()
    assert weights[2].isfinite().all()


def test_distant_logits_keep_their_weights() -> None:
    """Normalised sigmoids are right where every score by itself would be zero in float32, or one."""
    logits = torch.tensor([[-300.0, -301.0, -400.0], [300.0, 200.0, -300.0], [-90.0, -89.0, -88.0]])
    assert_right(logits, 2, True, "sigmoid")
    assert_right(logits, 3, True, "sigmoid")
    assert_right(logits, 3, False, "softmax")


def test_no_tokens() -> None:
    """No tokens give empty results of the right shape and dtype."""
    weights, ids = moe_route(torch.empty(0, 5), top_k=3)
    assert (weights.shape, weights.dtype) == ((0, 3), torch.float32)
    assert (ids.shape, ids.dtype) == ((0, 3), torch.int32)
