"""A model written as a GGUF file: what gguf reads of it, and what llama.cpp computes with it."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from assay.precision.auditing import Audit, audit
from assay.precision.errors import CannotExport
from assay.precision.export import export, write_gguf
from assay.precision.export.configurations.gguf import TensorNames
from assay.precision.export.reloading import LlamaCpp
from assay.precision.loading import load
from assay.precision.observation.operations import traced
from assay.precision.prediction.simulation import Simulator
from assay.precision.schemes import SCHEMES
from tests.precision.exported import Subject

FORMATS = ["q8_0", "q4_k", "q5_0", "iq4_nl"]
WITH_INPUTS = {"q8_0": "q8_0-q8_0", "q4_k": "q4_k-q8_k", "q5_0": "q5_0-q8_0"}
TEXT = Path(__file__).resolve().parents[2] / "configs" / "models" / "held-out.txt"


@cache
def stdlib() -> tuple[Audit, torch.Tensor]:
    """The bundled Llama, audited, and the tokens."""
    loaded = load("stdlib-llama")
    batches = loaded.batches(TEXT, sequence=48, sequences=4)
    made = audit(loaded.model, batches, formats=[*FORMATS, *WITH_INPUTS.values()], bits=16)
    return made, torch.cat([batch["input_ids"] for batch in batches])


def sites() -> dict[str, Any]:
    return {str(site): site for site in stdlib()[0].sites}


def mostly(scheme: str, otherwise: str) -> dict[str, str]:
    """A scheme at every weight whose rows are whole blocks of it, another at the rest."""
    made = stdlib()[0]
    return {name: scheme if scheme in made.menu(name) else otherwise for name, site in sites().items() if site.shape}


def simulated(assignment: dict[str, str], model: torch.nn.Module | None = None) -> torch.Tensor:
    """Logits of the bundled model, or another, with an assignment simulated."""
    made, ids = stdlib()
    simulator = Simulator({name: SCHEMES[scheme] for name, scheme in assignment.items()}, made.fits, {})
    chosen = model or made.model
    with torch.no_grad(), traced(chosen, simulator):
        return chosen(input_ids=ids).logits


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean Kullback-Leibler divergence of the next token, nats."""
    exact, found = (each.double().log_softmax(-1) for each in (reference, other))
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def apart(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as transformers has them, of those that a GGUF file of a Llama has."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def test_what_gguf_reads_gives_the_simulated_logits(tmp_path: Path) -> None:
    made, _ = stdlib()
    assignment = mostly("q4_k", "iq4_nl") | {"lm_head": "q8_0"}
    del assignment["model.layers.2.mlp.up_proj"]
    written = write_gguf(made.model, assignment, tmp_path / "model.gguf", sites=sites(), fits=made.fits)
    assert written.held == assignment
    reader, names, model = gguf.GGUFReader(written.path), TensorNames(made.model), deepcopy(made.model)
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert len(read) == len(reader.tensors) == len(list(model.parameters()))
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = read[names[name] or ""]
            scheme = assignment.get(name.removesuffix(".weight"), "bf16" if parameter.dim() > 1 else "f32")
            assert tensor.tensor_type.name == scheme.upper()
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).view(parameter.shape)
            part = name.split(".")[-2].removesuffix("_proj")
            parameter.copy_(apart(values, heads[part]) if part in heads else values)
    assert torch.equal(simulated({}, model), simulated(assignment))


def test_the_bytes_are_those_that_the_export_tells(tmp_path: Path) -> None:
    made, _ = stdlib()
    assignment = mostly("q4_k", "q5_0")
    written = write_gguf(made.model, assignment, tmp_path / "model.gguf", sites=sites(), fits=made.fits)
    export(made.model, assignment, tmp_path / "out", ["gguf"], sites=sites(), fits=made.fits)
    reader = gguf.GGUFReader(written.path)
    assert f"# tensors of {written.bytes:,} bytes" in (tmp_path / "out" / "gguf.txt").read_text()
    assert sum(int(tensor.n_bytes) for tensor in reader.tensors) == written.bytes
    lines = (tmp_path / "out" / "gguf-types.txt").read_text().split()
    told = {line.partition("=")[0].strip("^$").replace("\\", ""): line.partition("=")[2] for line in lines}
    assert told == {t.name: t.tensor_type.name.lower() for t in reader.tensors if len(t.shape) > 1}


def test_llama_cpp_has_the_error_that_is_simulated(tmp_path: Path) -> None:
    """llama.cpp's divergence is that of the simulation with inputs rounded, in eight bits too, where inputs are most of
    it; what lies between the two is a small part, since differences in the last bit tip roundings."""
    made, ids = stdlib()
    exact = simulated({})
    for scheme, otherwise in (("q8_0", "q8_0"), ("q4_k", "q5_0")):
        assignment = mostly(scheme, otherwise)
        rounded = {
            name: assignment[name] if name == "model.embed_tokens" else WITH_INPUTS[each]
            for name, each in assignment.items()
        }
        path = tmp_path / f"{scheme}.gguf"
        write_gguf(made.model, assignment, path, sites=sites(), fits=made.fits)
        served = LlamaCpp(path)(ids).logits
        theirs, ours = divergence(exact, served), divergence(exact, simulated(rounded))
        assert theirs == pytest.approx(ours, rel=0.15)
        assert divergence(simulated(rounded), served) < ours / 2
        if scheme == "q8_0":
            assert divergence(exact, simulated(assignment)) < ours / 3
        else:
            assert divergence(simulated(rounded), served) < ours / 10


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_llama_cpp_runs_the_model_that_was_written(kind: str, tmp_path: Path) -> None:
    """Each architecture, in float32, gives llama.cpp the logits that transformers has, but for its float16 caches; in
    blocks of 32 every weight of a linear is held."""
    configuration, model_of, more = MODELS[kind]
    torch.manual_seed(3)
    model = model_of(configuration(**SIZES, **more)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    if kind == "mixtral":
        model.set_experts_implementation("eager")
    ids = torch.arange(2 * 24).reshape(2, 24) * 11 % 64
    made = Subject.of(model, ids)
    given = {"sites": made.sites, "fits": made.fits, "dtype": torch.float32}
    write_gguf(model, {}, tmp_path / "exact.gguf", **given)
    with torch.no_grad():
        exact = model(ids).logits
    assert divergence(exact, LlamaCpp(tmp_path / "exact.gguf")(ids).logits) < 1e-5 * float(exact.var())
    linears = {name: "q8_0" for name, site in made.sites.items() if site.type == "linear" and site.role != "router"}
    linears = {name: scheme for name, scheme in linears.items() if not made.sites[name].tied}
    written = write_gguf(model, linears, tmp_path / "eight.gguf", **given)
    assert written.held == linears
    assert divergence(exact, LlamaCpp(tmp_path / "eight.gguf")(ids).logits) < 1e-2 * float(exact.var())


def test_what_the_file_has_no_place_for_is_refused(tmp_path: Path) -> None:
    made, _ = stdlib()
    given = {"sites": sites(), "fits": made.fits}
    (tmp_path / "mine.gguf").write_text("mine")
    with pytest.raises(CannotExport, match=r"mine\.gguf exists"):
        write_gguf(made.model, {}, tmp_path / "mine.gguf", **given)
    scaled = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    )
    with pytest.raises(CannotExport, match="expected RoPE as it is, got 'linear'"):
        write_gguf(transformers.LlamaForCausalLM(scaled), {}, tmp_path / "scaled.gguf", sites={}, fits=made.fits)
    window = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES))
    with pytest.raises(CannotExport, match="got a window"):
        write_gguf(window, {}, tmp_path / "window.gguf", sites={}, fits=made.fits)
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    with pytest.raises(CannotExport, match="expected a model of llama, qwen2, qwen3, got gpt2"):
        write_gguf(other, {}, tmp_path / "other.gguf", sites={}, fits=made.fits)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.gguf"]
