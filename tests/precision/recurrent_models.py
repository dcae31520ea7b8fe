"""Small language models of recurrent layers, and a few steps of training for small models of any kind."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from assay.precision.auditing import Audit
from assay.precision.schemes import SCHEMES, FakeQuantizer


class Recurrent(torch.nn.Module):
    def __init__(self, kind: Callable[..., torch.nn.Module], **options: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)
        self.rnn = kind(32, 48, batch_first=True, **options)
        self.head = torch.nn.Linear(48, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(ids))[0])


def sentences(count: int, seed: int, length: int = 13) -> torch.Tensor:
    """Symbols of which four in five follow from the one before."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (count, length), generator=draw)
    for place in range(1, length):
        follows = torch.rand(count, generator=draw) < 0.8
        ids[:, place] = torch.where(follows, (ids[:, place - 1] * 5 + 3) % 64, ids[:, place])
    return ids


def next_symbol(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def trained(
    build: Callable[[], torch.nn.Module],
    batches: Sequence[torch.Tensor],
    loss: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor],
) -> torch.nn.Module:
    """A model after 60 steps over the batches, the same every time."""
    torch.manual_seed(0)
    model = build().train()
    steps = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(60):
        steps.zero_grad()
        loss(model, batches[step % len(batches)]).backward()
        steps.step()
    return model.eval()


def assert_stored_weights_give_torchs_error(found: Audit, *names: str) -> FakeQuantizer:
    """Under w8a16 the error is that of a copy of the model with these parameters stored and read back; the last one's
    quantizer is returned."""
    other = copy.deepcopy(found.model).eval()
    for name in names:
        weight = found.model.get_parameter(name).detach()
        stored = found.fits.weight(name.removesuffix(".weight"), SCHEMES["w8a16"], weight.flatten(1))
        assert stored is not None
        other.get_parameter(name).data = stored(weight.flatten(1)).reshape(weight.shape)
    with torch.no_grad():
        one, two = (torch.cat([m(x).log_softmax(-1) for x in found.batches]) for m in (other, found.model))
    one, two = (each.reshape(-1, each.shape[-1]) for each in (one, two))
    expected = torch.nn.functional.kl_div(one, two, log_target=True, reduction="batchmean")
    measured = found.trial({name.removesuffix(".weight"): "w8a16" for name in names})
    assert float(measured) == pytest.approx(float(expected), rel=0.02)
    return stored
