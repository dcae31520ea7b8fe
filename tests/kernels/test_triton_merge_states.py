"""The Triton merge of two states of attention, against its formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.triton import merge_states as module
from assay.kernels.triton.merge_states import merge_states
from assay.kernels.triton.rows import CONFIGS
from tests.reference import reference

pytestmark = pytest.mark.usefixtures("interpreted")


def states(tokens: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two states whose log-sum-exps differ by up to some tens, and some of them empty, with NaN for an output."""
    drawn: list[Tensor] = []
    for _ in range(2):
        o, lse = torch.randn(tokens, heads, width), 10 * torch.randn(tokens, heads)
        empty = torch.rand(tokens, heads) < 0.2
        drawn += [torch.where(empty[..., None], torch.nan, o), torch.where(empty, -torch.inf, lse)]
    return drawn[0], drawn[1], drawn[2], drawn[3]


def assert_right(*tensors: Tensor) -> None:
    for found, right in zip(merge_states(*tensors), reference("merge_states")(*tensors), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("sizes", [(40, 3, 33), (2, 2, 2500)], ids=str)
def test_every_configuration(config: Any, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._merge_states_kernel, "configs", [config])
    assert_right(*states(*sizes))


def test_any_strides() -> None:
    o_a, lse_a, o_b, lse_b = states(5, 5, 64)
    assert_right(o_a.transpose(0, 1)[..., ::2], lse_a.t(), o_b[..., 32:], lse_b)
    assert_right(o_a, lse_a, o_b[:1].expand(5, 5, 64), lse_b[:1].expand(5, 5))


@pytest.mark.parametrize("sizes", [(0, 2, 8), (2, 0, 8), (3, 2, 0)], ids=str)
def test_nothing_in_nothing_out(sizes: tuple[int, int, int]) -> None:
    assert_right(*states(*sizes))


def test_a_state_alone_is_what_comes_out() -> None:
    o, lse = torch.randn(4, 2, 16), torch.randn(4, 2)
    nothing = torch.full_like(o, torch.nan), torch.full_like(lse, -torch.inf)
    for merged in (merge_states(o, lse, *nothing), merge_states(*nothing, o, lse)):
        assert torch.equal(merged[0], o)
        assert torch.equal(merged[1], lse)
