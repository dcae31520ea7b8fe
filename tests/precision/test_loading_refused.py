"""A directory that can't be loaded says what is wrong in it, in one line."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading import load
from assay.runtime.errors import NotInstalled
from tests.precision.tiny_models import edit_json, edit_weights, refusal


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_needs_trust(llama: Path, file: str) -> None:
    edit_json(llama / file, auto_map={"AutoModelForCausalLM": "modeling.Own"})
    assert f"{file} asks for code that comes with the model (auto_map)" in refusal(llama, UntrustedModel)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised already"),
        ({"architectures": None}, "names no architecture"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "is a T5ForConditionalGeneration; expected a causal"),
        ({"model_type": "nonesuch"}, "can't be loaded by transformers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight and 8 more"),
        ({"num_hidden_layers": 1}, "has more than config.json describes: model.layers.1.input_layernorm.weight and 8"),
        ({"intermediate_size": 64}, "mlp.down_proj.weight is (32, 48), by config.json (32, 64) and 5 more"),
    ],
)
def test_a_configuration_that_fits_not_is_refused(llama: Path, changes: dict[str, Any], says: str) -> None:
    edit_json(llama / "config.json", **changes)
    assert says in refusal(llama, BadModel)


def test_a_missing_expert_is_named_as_it_is_stored(stored: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(stored("mixtral"), tmp_path / "mixtral")
    gone = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    edit_weights(folder, lambda weights: weights.pop(gone))
    assert f"weights of an expert are missing: {gone}" in refusal(folder, BadModel)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "can't be read as JSON"),
        ("config.json", b"[]", "holds a list; expected a JSON object"),
        ("model.safetensors", None, "has no weights; expected model.safetensors"),
        ("model.safetensors", b"not weights", "is no safetensors file, or is cut off"),
        ("tokenizer.json", b"{}", "its tokenizer can't be loaded"),
    ],
)
def test_a_damaged_file_is_named(llama: Path, file: str, content: bytes | None, says: str) -> None:
    if content is None:
        (llama / file).unlink()
    else:
        (llama / file).write_bytes(content)
    assert says in refusal(llama, BadModel)


def test_cut_off_weights_are_refused(llama: Path) -> None:
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[:-100])
    assert f"{llama / 'model.safetensors'} is no safetensors file, or is cut off" in refusal(llama, BadModel)


def test_weights_that_are_not_finite_are_counted(llama: Path) -> None:

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][0, :3] = torch.nan
        weights["model.layers.1.mlp.up_proj.weight"][1, 0] = -torch.inf
        weights["model.norm.weight"][0] = torch.inf

    edit_weights(llama, spoil)
    said = refusal(llama, BadModel)
    assert "model.layers.1.mlp.up_proj.weight holds 3 NaN and 1 infinite among 1536 values" in said
    assert "1 more" in said


def test_a_file_of_a_model_points_to_its_directory(llama: Path) -> None:
    assert f"give the directory that it stands in: {llama}" in refusal(llama / "model.safetensors", UnknownModel)
    (llama / "notes.txt").write_text("x")
    assert "is no model file" in refusal(llama / "notes.txt", UnknownModel)


def test_without_transformers_the_extra_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'kernel-assay[audit]'" in refusal(llama, NotInstalled)


def test_loading_is_silent(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_weights(llama, lambda weights: weights.pop("lm_head.weight"))
    refusal(llama, BadModel)
    load("stdlib-llama")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_damaged_shards_are_named(stored: Callable[[str], Path], tmp_path: Path) -> None:
    load(stored("llama")).model.save_pretrained(tmp_path, max_shard_size="20KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    weights = load_file(first)
    gone = sorted(weights)[0]
    save_file({name: value for name, value in weights.items() if name != gone}, first, metadata={"format": "pt"})
    assert f"{first.name} lacks {gone}, which model.safetensors.index.json" in refusal(tmp_path, BadModel)
    second.unlink()
    first.unlink()
    assert f"lacks {first.name}" in refusal(tmp_path, BadModel)
