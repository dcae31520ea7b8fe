"""Loading a model to audit: a bundled one, a directory, a factory, an exported program.

A directory that can't be loaded says what is wrong in it, in one line.

Texts as batches of tokens.
"""

import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from assay.precision.errors import BadModel, UnknownModel, UntrustedModel
from assay.precision.loading import Loaded, batches_of, bundled, load
from assay.runtime.errors import AssayError, NotInstalled
from tests.precision.tiny_models import SIZES, TEXT, edit_json, edit_weights, refusal, text_refusal


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
        ("config.json", b"{", "is no JSON"),
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


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_weights_are_refused_at_once(llama: Path, name: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    for content in ({**config, name: 10**9}, {**config, "text_config": {name: 10**9}}):
        (llama / "config.json").write_text(json.dumps(content))
        assert f"{name}: expected at most 1,000, by its weights, got 1,000,000,000" in refusal(llama, BadModel)


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


def test_a_text_is_cut_into_equal_disjoint_sequences_over_its_whole_length(stdlib_llama: Loaded) -> None:
    batches = batches_of(TEXT, stdlib_llama.tokenizer, sequence=32, sequences=11, batch=4)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 32), (4, 32), (3, 32)]
    rows = torch.cat([batch["input_ids"] for batch in batches]).tolist()
    assert all(bool(batch["attention_mask"].all()) for batch in batches)
    starts = [TEXT.index(bytes(row).decode()) for row in rows]
    assert (starts[0], starts[-1]) == (0, len(TEXT) - 32)
    gaps = [after - before for before, after in pairwise(starts)]
    assert min(gaps) >= 32
    assert max(gaps) - min(gaps) <= 1


def test_a_bundled_tokenizer_gives_each_byte_its_value() -> None:
    text = "\x00\tdéjà vu, 日本語 Ā\r\n\n"
    tokenizer = load("stdlib-mixtral").tokenizer
    (batch,) = batches_of(text, tokenizer)
    assert bytes(batch["input_ids"][0].tolist()) == text.encode()
    assert tokenizer.decode(batch["input_ids"][0]) == text


def test_a_short_text_is_used_as_it_is(stdlib_llama: Loaded) -> None:
    assert [batch["input_ids"].tolist() for batch in stdlib_llama.batches("ab")] == [[[97, 98]]]
    assert [batch["input_ids"].shape for batch in stdlib_llama.batches(TEXT[:300])] == [(1, 256)]
    assert "gives 1 token;" in text_refusal(stdlib_llama, "a")


def test_lines_are_padded_and_masked(stdlib_llama: Loaded) -> None:
    (batch,) = batches_of("one\n\nthree\n", stdlib_llama.tokenizer, sequence=4, lines=True)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert bytes(batch["input_ids"][1].tolist()) == b"thre"


def test_special_tokens_stand_around_every_sequence(stored: Callable[[str], Path]) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load(stored("bert")).tokenizer
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="! $A ?", special_tokens=[("!", ord("!")), ("?", ord("?"))]
    )
    (batch,) = batches_of("abcdefgh", tokenizer, sequence=5)
    assert [bytes(row) for row in batch["input_ids"].tolist()] == [b"!abc?", b"!fgh?"]


def test_a_text_that_gives_nothing_is_refused(stdlib_llama: Loaded, tmp_path: Path) -> None:
    loaded = stdlib_llama
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"abc\xff")
    assert "the text is empty" in text_refusal(loaded, "")
    assert f"{empty} is empty" in text_refusal(loaded, empty)
    assert "byte 3 is no UTF-8" in text_refusal(loaded, binary)
    assert f"{tmp_path}: can't be read" in text_refusal(loaded, tmp_path)
    assert "No such file" in text_refusal(loaded, tmp_path / "none.txt")
    assert "give Path(" in text_refusal(loaded, str(binary))
    assert "at most 256 tokens, got sequence=512" in text_refusal(loaded, TEXT, sequence=512)
    with pytest.raises(AssayError, match="sequence=1; expected at least 2"):
        loaded.batches(TEXT, sequence=1)


def test_another_models_tokenizer_is_refused(llama: Path) -> None:
    edit_json(llama / "config.json", vocab_size=100)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    edit_weights(llama, lambda weights: weights.update({name: weights[name][:100].clone() for name in names}))
    loaded = load(llama)
    assert loaded.batches("123")
    assert "gives token 'z' the id 122, but the model has 100 ids" in text_refusal(loaded, "xyz")
