"""Tiny random models of transformers, ways to damage them, and the lines with which they are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from assay.precision.errors import BadText
from assay.precision.loading import Loaded, load
from assay.runtime.errors import AssayError

SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=1)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_hidden_layers=1, num_key_value_heads=1, num_local_experts=4)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=1)),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, num_hidden_layers=1)),
    "classifier": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_hidden_layers=1)
    ),
}
TEXT = "".join(f"{number} squared is {number * number}.\n" for number in range(200))


def edit_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Store the weights again after ``change`` of the dict."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(target: Any, error: type[AssayError], **options: Any) -> str:
    with pytest.raises(error) as caught:
        load(target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def text_refusal(loaded: Loaded, text: str | Path, **options: Any) -> str:
    with pytest.raises(BadText) as caught:
        loaded.batches(text, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
