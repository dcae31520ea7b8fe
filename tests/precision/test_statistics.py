"""What is noted of the values that pass a site, and of the sites themselves."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from assay.precision import audit
from assay.precision.observation.sites import Site, Statistics, heads_among
from tests.precision.small_models import Made


def test_moments_are_of_all_positions_alike() -> None:
    x = torch.randn(8, 256, 1024)
    x[:, 0] *= 30
    seen = Statistics()
    seen.add(x, sequences=8)
    torch.testing.assert_close(seen.moments().square, x.flatten(0, 1).square().mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(seen.moments().mean, x.flatten(0, 1).abs().mean(0), rtol=1e-5, atol=1e-5)
    assert seen.importance()[1] == seen.count == 8 * 256


def test_padding_is_no_part_of_what_is_fitted() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[0] *= 40  # of the token that pads
    ids = torch.randint(1, 64, (4, 12))
    short = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded = {name: torch.nn.functional.pad(tensor, (0, 20)) for name, tensor in short.items()}
    one, other = (audit(model, [batch, batch], formats=["fp8-tensor", "w8a8"]).observed for batch in (short, padded))
    assert one.statistics.keys() == other.statistics.keys(), "a cache is found in one alone"
    for (name, part), seen in other.statistics.items():
        expected = one.statistics[name, part]
        if seen.largest is None or name.endswith((":scores", ":probabilities")):
            continue
        assert seen.valid_rows == expected.valid_rows, name
        for what in ("mean", "square", "largest"):
            found, right = (getattr(each.moments(), what) for each in (seen, expected))
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda site: pickle.loads(pickle.dumps(site))])
def test_a_site_survives_copies(copied: Callable[[Site], Site]) -> None:
    site = Site("model.layers.0.q_proj", "linear", "linear", (8, 4), "model.layers.0.qkv", "", "model.embed")
    assert copied(site) == site
    assert vars(copied(site)) == vars(site)


def test_the_head_is_told_from_linears_of_the_same_shape() -> None:
    sizes = {"vocab_size": 96, "max_position_embeddings": 128, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=16)
    found = audit(transformers.GPTNeoForCausalLM(config).eval(), [{"input_ids": torch.arange(64).view(4, 16)}])
    assert heads_among(found.all_sites) == {"lm_head"}


def test_a_loss_of_sequences_that_share_rows_is_predicted() -> None:

    def shared(m: Any, ids: Tensor) -> Tensor:
        x = 0.3 * m.tokens(ids) + m.shared(m.positions(torch.arange(ids.shape[1])))
        return m.head(torch.tanh(x))

    def loss(logits: Tensor, batch: Any) -> Tensor:
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch["ids"][:, 1:], reduction="none")
        return losses.mean(1)

    torch.manual_seed(0)
    ids = (torch.arange(16) * 3 % 7).repeat(16, 1)
    tables = {"tokens": torch.nn.Embedding(50, 32), "positions": torch.nn.Embedding(16, 32)}
    model = Made(shared, **tables, shared=torch.nn.Linear(32, 32), head=torch.nn.Linear(32, 50))
    found = audit(model.eval(), [{"ids": ids}, {"ids": ids}], loss, ["fp8", "w4a16-g32"])
    for scheme in ("fp8", "w4a16-g32"):
        assert 0.2 < found.contribution("shared", scheme) / found.trial({"shared": scheme}) < 6
