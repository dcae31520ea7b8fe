"""Attention as an engine runs it: queries in FP8 beside an FP8 cache, and sequences too long for their scores."""

import math

import pytest
import torch
from torch import Tensor

from assay.precision import audit
from assay.precision.export import online_config
from assay.precision.observation import operations
from assay.precision.observation.operations import traced
from assay.precision.observation.running import evaluating
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES

HEADS, WIDTH = 2, 16


class Attention(torch.nn.Module):
    """A projection to queries, keys and values, causal attention, and one back."""

    def __init__(self, mask: bool = False) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 3 * HEADS * WIDTH)
        self.out = torch.nn.Linear(HEADS * WIDTH, 32)
        self.mask = mask

    def parts(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.mask else None
        found = torch.nn.functional.scaled_dot_product_attention(*self.parts(x), seen, is_causal=seen is None)
        return self.out(found.transpose(1, 2).flatten(-2))


def made(mask: bool = False) -> tuple[Attention, Tensor]:
    torch.manual_seed(3)
    return Attention(mask), torch.randn(4, 24, 32)


def rounded(x: Tensor) -> Tensor:
    """In E4M3, with one scale of the tensor, held in bfloat16."""
    scale = (x.abs().max() / 448).to(torch.bfloat16).float()
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def test_queries_are_rounded_beside_the_cache() -> None:
    model, x = made()
    found = audit(model, [x], "relative", ["kv-fp8", "kv-fp8-q"])
    q, k, v = (part.detach() for part in model.parts(x))
    own = model(x).detach().double()
    for scheme, query in (("kv-fp8", q), ("kv-fp8-q", rounded(q))):
        attended = torch.nn.functional.scaled_dot_product_attention(query, rounded(k), rounded(v), is_causal=True)
        output = model.out(attended.transpose(1, 2).flatten(-2)).detach().double()
        expected = float((output - own).norm() / own.norm())
        assert float(found.measure({":kv_cache": scheme})) == pytest.approx(expected, rel=1e-3)


def test_what_the_queries_add_is_predicted() -> None:
    model, _ = made()
    found = audit(model, [torch.randn(32, 24, 32) for _ in range(2)], "relative", ["kv-fp8", "kv-fp8-q"])
    both = found.contribution(":kv_cache", "kv-fp8-q")
    assert both == pytest.approx(found.measure({":kv_cache": "kv-fp8-q"}), rel=0.1)
    assert both > found.contribution(":kv_cache", "kv-fp8")


def test_the_cache_alone_leaves_queries_open_to_a_scheme() -> None:
    model, x = made()
    found = audit(model, [x], "relative", ["bf16"])
    both = found.trial({":kv_cache": "bf16", ":q": "bf16"})
    assert both > found.trial({":kv_cache": "bf16"})
    predicted = found.predictor.uncalibrated({":kv_cache": "bf16", ":q": "bf16"})[0]
    assert predicted > found.contribution(":kv_cache", "bf16")


def test_exports_take_it_as_an_fp8_cache() -> None:
    model, x = made()
    found = audit(model, [x], "relative", ["kv-fp8", "kv-fp8-q"])
    sites = {str(site): site for site in found.sites}
    recipes = [online_config({":kv_cache": scheme}, sites) for scheme in ("kv-fp8", "kv-fp8-q")]
    assert recipes[0].content == recipes[1].content
    assert ":kv_cache" in recipes[1].held


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("schemes", [{}, {":scores": "a-fp8", ":probabilities": "a-int8", ":kv_cache": "kv-int8"}])
def test_chunks_of_queries_give_what_all_give(
    monkeypatch: pytest.MonkeyPatch, mask: bool, schemes: dict[str, str]
) -> None:
    model, x = made(mask)
    found = audit(model, [x], "relative", ["a-fp8", "a-int8", "kv-int8"])
    outputs, largest = [], []
    for scores in (1 << 24, 5 * 24 * 4 * HEADS):
        monkeypatch.setattr(operations, "_SCORES", scores)
        simulator = Watched({name: SCHEMES[each] for name, each in schemes.items()}, found.fits, {})
        with torch.no_grad(), evaluating(model), traced(model, simulator):
            outputs.append(model(x))
        largest.append(simulator.largest)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
    assert largest == [4 * HEADS * 24 * 24, 4 * HEADS * 5 * 24]
    assert math.isfinite(float(outputs[1].sum()))


class Watched(Simulator):
    """Notes the most scores that were there at once."""

    largest = 0

    def values(self, name: str, x: Tensor, part: str = "") -> Tensor:
        if name.endswith(":scores"):
            self.largest = max(self.largest, x.numel())
        return super().values(name, x, part)
