"""Loading a model to audit: a bundled one, a directory, a factory, an exported program."""

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading import bundled, load
from tests.precision.tiny_models import SIZES, TEXT, refusal, text_refusal


@pytest.mark.parametrize("name", ["stdlib-llama", "stdlib-mixtral"])
def test_a_bundled_model_predicts_text_that_it_was_not_trained_on(name: str) -> None:
    loaded = load(name)
    home = bundled()[name]
    recorded = json.loads((home / "training.json").read_text())["held_out_nats_per_byte"]
    losses = []
    with torch.no_grad():
        for batch in loaded.batches(home.parent / "held-out.txt", sequences=32):
            logits = loaded.model(**batch).logits[:, :-1].flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, batch["input_ids"][:, 1:].flatten()).item())
    assert abs(sum(losses) / len(losses) - recorded) < 0.15  # 8 kB of 200
    assert (loaded.kind, loaded.stored, loaded.vocabulary) == ("causal_lm", torch.bfloat16, 256)
    assert sum(file.stat().st_size for file in home.iterdir()) < 8e6


@pytest.mark.parametrize(
    ("model", "kind"),
    [("llama", "causal_lm"), ("mixtral", "causal_lm"), ("gpt2", "causal_lm"), ("bert", "encoder"),
     ("masked", "encoder"), ("classifier", "classifier")],
)  # fmt: skip
def test_a_directory_is_loaded_by_its_architecture(stored: Callable[[str], Path], model: str, kind: str) -> None:
    loaded = load(stored(model))
    assert (loaded.kind, loaded.name, loaded.path) == (kind, model, stored(model))
    assert not loaded.model.training
    assert loaded.stored == torch.bfloat16
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.float32}
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in loaded.model.parameters())
    assert (loaded.model.config._attn_implementation, loaded.model.config._experts_implementation) == ("sdpa", "eager")
    loaded.model(**loaded.batches(TEXT, sequence=16, sequences=2)[0])


def test_an_architecture_without_fused_attention_is_loaded_with_its_own(tmp_path: Path) -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).save_pretrained(tmp_path)
    assert load(tmp_path).model.config._attn_implementation == "eager"


def test_float64_is_a_choice(stored: Callable[[str], Path]) -> None:
    single, double = load(stored("llama")).model, load(stored("llama"), dtype=torch.float64).model
    pairs = zip(single.parameters(), double.parameters(), strict=True)
    assert all(b.dtype == torch.float64 and torch.equal(a.double(), b) for a, b in pairs)


def test_a_sharded_model_is_the_same_model(stored: Callable[[str], Path], tmp_path: Path) -> None:
    whole = load(stored("mixtral"))
    whole.model.bfloat16().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    shards = load(str(tmp_path / "shards"))
    assert shards.tokenizer is None
    again = shards.model.state_dict()
    assert all(torch.equal(value.float(), again[name]) for name, value in whole.model.state_dict().items())


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            "stdlib-lama",
            "expected stdlib-llama, stdlib-mixtral, a directory with config.json, or package.",
        ),
        ("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir DIR"),
        ("nonesuch_module:make", "nonesuch_module can't be imported"),
        ("torch.nn:Linea", "did you mean 'Linear'"),
    ],
)
def test_an_unknown_model_is_answered_with_what_there_is(target: str, says: str) -> None:
    assert says in refusal(target, UnknownModel)


def test_a_factory_gives_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_models.py").write_text(
        "import torch\n"
        "def right(): return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()).half()\n"
        "def exported(): return torch.export.export(right().float(), (torch.zeros(1, 4),))\n"
        "def failing(): raise RuntimeError('no weights\\nhere')\n"
        "def number(): return 3\n"
        "def lazy(): return torch.nn.LazyLinear(3)\n"
        "def meta(): return torch.nn.Linear(4, 4, device='meta')\n"
        "def flat(): return torch.nn.LayerNorm(4)\n"
        "SIZE = 4\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loaded = load("users_models:right")
    assert (loaded.kind, loaded.name, loaded.path, loaded.tokenizer) == ("module", "users_models:right", None, None)
    assert (loaded.stored, loaded.model[0].weight.dtype, loaded.model.training) == (torch.float16, torch.float32, False)
    assert load("users_models:exported").kind == "exported"
    assert "(RuntimeError: no weights here)" in refusal("users_models:failing", BadModel)
    assert "gives int; expected a torch.nn.Module" in refusal("users_models:number", BadModel)
    assert "is of type int; expected a function" in refusal("users_models:SIZE", BadModel)
    assert "weight has no shape yet" in refusal("users_models:lazy", BadModel)
    assert "weight is on the meta device" in refusal("users_models:meta", BadModel)
    assert "a LayerNorm without linear, convolutional or recurrent layers" in refusal("users_models:flat", BadModel)
    assert "has no tokenizer" in text_refusal(loaded, TEXT)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A two-layer network as a file of torch.export."""
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    torch.export.save(torch.export.export(network, (torch.zeros(2, 8),)), tmp_path / "network.pt2")
    return tmp_path / "network.pt2"


def test_an_exported_program_is_loaded_from_its_file_and_as_an_object(exported: Path) -> None:
    program = torch.export.load(exported)
    x = torch.randn(2, 8)
    for target in (str(exported), program):
        loaded = load(target)
        assert loaded.kind == "exported"
        assert torch.equal(loaded.model(x), program.module()(x))


def test_a_cut_off_exported_program_is_refused(exported: Path) -> None:
    exported.write_bytes(exported.read_bytes()[:1000])
    assert "is no .pt2 file, or is cut off" in refusal(exported, BadModel)


def test_an_exported_program_without_products_is_refused() -> None:
    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    assert "without linear, convolutional or recurrent layers" in refusal(program, BadModel)


class Touch:
    """Pickled, it creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def with_entry(archive: Path, entry: str, content: bytes) -> None:
    """Put an entry into a zip archive, in place of one of that name."""
    with zipfile.ZipFile(archive) as opened:
        entries = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as opened:
        for name, old in (entries | {entry: content}).items():
            opened.writestr(name, content if name == entry else old)


def test_code_in_an_exported_program_is_run_only_on_trust(exported: Path, tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    torch.save(Touch(hit), tmp_path / "pickled")
    with_entry(exported, "network/data/sample_inputs/model.pt", (tmp_path / "pickled").read_bytes())
    assert "can't be read by torch" in refusal(exported, BadModel)
    assert not hit.exists()
    refusal(exported, BadModel, trust=True)  # a directory's name is no example input, but by then there is one
    assert hit.exists()


def test_pickled_objects_in_an_exported_program_need_trust(exported: Path) -> None:
    with_entry(exported, "network/data/constants/opaque_obj_0", pickle.dumps(Touch(exported)))
    assert "holds a pickle (network/data/constants/opaque_obj_0)" in refusal(exported, UntrustedModel)
    assert load(exported, trust=True).kind == "exported"  # which no constant refers to


def test_pickles_need_trust(llama: Path, tmp_path: Path) -> None:
    expected = load(llama).model.state_dict()
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    assert "only as pickle (pytorch_model.bin)" in refusal(llama, UntrustedModel)
    trusted = load(llama, trust=True).model.state_dict()
    assert all(torch.equal(value, trusted[name]) for name, value in expected.items())
    network = torch.nn.Linear(3, 3)
    torch.save(network, tmp_path / "network.pt")
    assert "is a pickle" in refusal(tmp_path / "network.pt", UntrustedModel)
    assert torch.equal(load(tmp_path / "network.pt", trust=True).model.weight, network.weight)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    assert "holds a dict of 2 entries" in refusal(tmp_path / "weights.pth", BadModel, trust=True)
