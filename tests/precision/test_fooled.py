"""Models that fooled an audit once: what they share, use twice or leave undefined is seen, or refused in one line."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.precision import audit
from assay.precision.errors import BadModel, WrongShape
from tests.precision.small_models import Made

FORMATS = ("bf16", "fp8", "w8a16", "w4a16-g32")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Shared:
    """What blocks leave for those after them, elsewhere than in what they return."""

    values: Tensor


class Layer(torch.nn.Module):
    def __init__(self, shared: Shared, first: bool) -> None:
        super().__init__()
        self.shared, self.first = shared, first
        self.v, self.o = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.shared.values = self.v(x)
        return x + self.o(torch.tanh(x * self.shared.values))


class Sharing(torch.nn.Module):
    """Four layers, of which the first makes what all multiply with, as where layers share keys and values."""

    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.layers = torch.nn.ModuleList(Layer(shared, number == 0) for number in range(4))
        self.head = torch.nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_blocks_that_share_a_state_are_measured_as_the_model_is() -> None:
    torch.manual_seed(0)
    model = Sharing().eval()
    found = audit(model, [normal(4, 8, 32, seed=seed) for seed in range(2)], "relative", FORMATS)
    assert found.choice_evaluator.chain is None
    one, other = {"layers.3.o": "bf16"}, {"layers.0.v": "w4a16-g32"}
    found.choice_evaluator.measure_all([one, other])
    alone = audit(model, [normal(4, 8, 32, seed=seed) for seed in range(2)], "relative", FORMATS)
    assert float(found.trial(one)) == pytest.approx(float(alone.trial(one)), rel=1e-6)


def test_a_parameter_of_all_layers_is_told_as_unaudited() -> None:

    def stacked(m: Any, x: Tensor) -> Tensor:
        for layer in m.w:
            x = x + torch.einsum("btd,dhk->bthk", x, layer).flatten(-2).tanh()
        return m.head(x)

    model = Made(stacked, w=torch.nn.Parameter(0.2 * normal(3, 32, 4, 8)), head=torch.nn.Linear(32, 16))
    found = audit(model, [normal(4, 8, 32)], "relative", FORMATS)
    assert [str(site) for site in found.sites] == ["head"]
    assert "w (3,072" in str(found.observed.unaudited)


@pytest.mark.parametrize("columns", [32, 16])
def test_a_weight_that_is_multiplied_from_both_sides_is_refused(columns: int) -> None:
    linear, w = torch.nn.functional.linear, torch.nn.Parameter(normal(columns, 32))
    model = Made(lambda m, x: linear(linear(x, m.w).tanh(), m.w.t()), w=w)
    with pytest.raises(BadModel, match="expected products with w from one side, got some with its transpose too"):
        audit(model, [normal(4, 8, 32)], "relative", FORMATS)


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 5, 6, 7)])
def test_outputs_that_are_no_distributions_have_no_divergence(shape: tuple[int, ...]) -> None:
    proj = torch.nn.Linear(32, torch.Size(shape[1:]).numel())
    model = Made(lambda m, x: m.proj(x).reshape(shape), proj=proj)
    with pytest.raises(WrongShape, match=r"expected logits .* take metric='relative' or a loss of your own"):
        audit(model, [normal(8, 32)], "kl", FORMATS)
    assert audit(model, [normal(8, 32)], "relative", FORMATS).trial({"proj": "w4a16-g32"}) > 0


class Mixed(torch.nn.Module):
    """A table in float32, a linear in bfloat16, a buffer that is a weight, a complex parameter that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32).bfloat16()
        self.register_buffer("features", normal(48, 32))
        self.shift = torch.nn.Parameter(normal(1, 32))
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.shift * self.turn.real.mean()
        return torch.nn.functional.linear(x + self.inner(x.to(self.inner.weight.dtype)).float(), self.features)


def test_bytes_are_those_of_each_tensor() -> None:
    model = Mixed().eval()
    tensors = [*model.parameters(), *model.buffers()]
    found = audit(model, [torch.arange(32).view(4, 8)], "relative", FORMATS)
    assert found.cost({}).bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert found.cost({"table": "bf16"}).bytes == found.cost({}).bytes - 2 * 64 * 32
    assert found.cost({"inner": "bf16"}).bytes == found.cost({}).bytes


def test_a_batch_of_more_than_the_model_takes_is_refused() -> None:
    x, labels = normal(8, 32), torch.arange(8)
    with pytest.raises(BadModel, match=r"got more \(.*'labels'\): what a loss of your own needs from a batch, forward"):
        audit(torch.nn.Linear(32, 16), [{"input": x, "labels": labels}], lambda out, batch: out.sum(1), FORMATS)


def test_products_within_autocast_are_audited() -> None:

    def within(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m.inner(x)
        return m.head(y.float())

    torch.manual_seed(0)
    model = Made(within, inner=torch.nn.Linear(32, 32), head=torch.nn.Linear(32, 16))
    found = audit(model, [normal(16, 8, 32)], "relative", FORMATS)
    assert 0.5 < found.contribution("inner", "w4a16-g32") / found.trial({"inner": "w4a16-g32"}) < 2


def test_a_gradient_that_is_nan_at_padding_closes_no_site() -> None:

    def normed(m: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = m.table(input_ids)
        return m.head(x / torch.sqrt(x.pow(2).sum(-1, keepdim=True)).clamp(min=1e-6))

    torch.manual_seed(0)
    model = Made(normed, table=torch.nn.Embedding(64, 32, padding_idx=0), head=torch.nn.Linear(32, 64))
    mask = torch.ones(8, 8, dtype=torch.long)
    mask[:4, 5:] = 0
    batches: list[Mapping[str, Any]] = [
        {"input_ids": (torch.arange(64).view(8, 8) * step % 63 + 1) * mask, "attention_mask": mask} for step in (1, 5)
    ]
    found = audit(model.eval(), batches, "kl", FORMATS)
    for scheme in ("w8a16", "w4a16-g32"):
        assert 0.5 < found.contribution("table", scheme) / found.trial({"table": scheme}) < 2
