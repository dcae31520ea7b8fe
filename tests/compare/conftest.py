"""A small model of transformers, and a pair of its runs recorded and compared."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.compare import Report, compare, record

Change = Callable[[Any], None]
"""Alters a model in place."""


@pytest.fixture(scope="session")
def tokens() -> Tensor:
    return torch.randint(96, (1, 24), generator=torch.Generator().manual_seed(1))


def _model(kind: str, **config: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    usual = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
    }
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(usual | config)), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.copy_(1 + 0.2 * torch.randn_like(weight) if "norm" in name else weight * 4)
    return made


@pytest.fixture(scope="session")
def llama() -> nn.Module:
    return _model("llama", intermediate_size=96)


@pytest.fixture(scope="session")
def mixtral() -> nn.Module:
    return _model("mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2)


class Pair:
    """Records two runs of altered copies of a model and compares them."""

    def __init__(self, folder: Path, tokens: Tensor) -> None:
        self.folder, self.tokens = folder, tokens

    def __call__(self, model: nn.Module, a: Change = lambda model: None, b: Change = lambda model: None) -> Report:
        for name, change in (("a", a), ("b", b)):
            own = copy.deepcopy(model)
            change(own)
            with torch.no_grad(), record(self.folder / name, own):
                own(self.tokens)
        return compare(self.folder / "a", self.folder / "b")


@pytest.fixture
def pair(tmp_path: Path, tokens: Tensor) -> Pair:
    return Pair(tmp_path, tokens)
