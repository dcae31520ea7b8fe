"""What llama.cpp is given: a type for each tensor, an importance matrix, commands."""

import re
import shlex
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from assay.precision.errors import CannotExport
from assay.precision.export import Exported, unexportable
from assay.precision.export.configurations.gguf import TensorNames
from assay.precision.schemes.ggml import block_types, pack
from tests.precision.exported import IDS, Subject, subject
from tests.precision.test_export_experts import experts, sparse

LAYERS = 12
DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.11.mlp.up_proj"


def deep() -> Subject:
    """A model of more than ten layers, with rows of whole blocks of 256 in one kind of linear."""
    return Subject(num_hidden_layers=LAYERS)


def write(made: Subject, assignment: dict[str, str], out: Path, **options: Any) -> Exported:
    """The export for llama.cpp alone."""
    return made.export(assignment, out, ["gguf"], **options)


def types(out: Path) -> dict[str, str]:
    """The lines of a tensor-type file, as llama-quantize splits it: by white space, then at the first equals sign."""
    words = (out / "gguf-types.txt").read_text().split()
    return dict(word.split("=", 1) for word in words)


def tensors(made: Subject) -> dict[str, torch.nn.Parameter]:
    """The tensors that the converter writes for a Llama, by gguf's names."""
    names = TensorNames(made.model)
    found = {names[name]: parameter for name, parameter in made.model.named_parameters()}
    assert None not in found
    return found  # type: ignore[return-value]


def test_each_tensor_is_matched_by_one_line(tmp_path: Path) -> None:
    made = deep()
    write(made, {DOWN: "q4_k", UP: "q8_0-q8_0", "lm_head": "q5_0", "model.embed_tokens": "iq4_nl"}, tmp_path / "out")
    lines = types(tmp_path / "out")
    matrices = [name for name, parameter in tensors(made).items() if parameter.dim() > 1]
    assert len(lines) == len(matrices) == 7 * LAYERS + 2
    found = {name: [kind for line, kind in lines.items() if re.search(line.lower(), name)] for name in matrices}
    assert all(len(kinds) == 1 for kinds in found.values())
    asked = {"blk.1.ffn_down": "q4_k", "blk.11.ffn_up": "q8_0", "output": "q5_0", "token_embd": "iq4_nl"}
    for name, kinds in found.items():
        assert kinds == [asked.get(name.removesuffix(".weight"), "bf16")]


def test_the_importance_matrix_is_the_simulation_s(tmp_path: Path) -> None:
    made = subject()
    write(made, {"model.layers.1.mlp.down_proj": "q3_k"}, tmp_path / "out")
    reader = gguf.GGUFReader(tmp_path / "out" / "gguf-imatrix.gguf")
    assert reader.fields["general.type"].contents() == "imatrix"
    assert {"imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"} <= set(reader.fields)
    read = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    linears = [name for name, site in made.sites.items() if site.type == "linear"]
    assert len(read) == 2 * len(linears)
    names = TensorNames(made.model)
    for name in linears:
        tensor, scheme = names[f"{name}.weight"], "q3_k" if made.sites[name].shape[-1] % 256 == 0 else "q4_0"
        weight = made.model.get_parameter(f"{name}.weight").detach()
        importance = read[f"{tensor}.in_sum2"][0] / read[f"{tensor}.counts"][0]
        stored = gguf.dequantize(
            pack(weight, block_types()[scheme], importance).numpy(), gguf.GGMLQuantizationType[scheme.upper()]
        )
        assert torch.equal(torch.from_numpy(stored).view_as(weight), made.stored(name, scheme))


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    made = sparse("mixtral")
    done = write(made, experts(made, "q4_0"), tmp_path / "out")
    assert done.parts[0].held == experts(made, "q4_0")
    lines = types(tmp_path / "out")
    for part in ("gate", "up", "down"):
        assert lines[rf"^blk\.1\.ffn_{part}_exps\.weight$"] == "q4_0"
    assert not any("ffn_gate_inp" in line for line in lines)
    reader = gguf.GGUFReader(tmp_path / "out" / "gguf-imatrix.gguf")
    read = {tensor.name: tensor.data.shape for tensor in reader.tensors}
    assert read["blk.1.ffn_down_exps.weight.in_sum2"] == (4, 128)
    assert read["blk.1.ffn_down_exps.weight.counts"] == (4, 1)


def test_a_tied_table_is_told_once(tmp_path: Path) -> None:
    made = Subject(tie_word_embeddings=True)
    done = write(made, {"model.embed_tokens": "q4_0"}, tmp_path / "out")
    lines = types(tmp_path / "out")
    assert lines[r"^token_embd\.weight$"] == "q4_0"
    assert r"^output\.weight$" not in lines
    assert done.parts[0].held == {"model.embed_tokens": "q4_0"}


def test_what_llama_quantize_would_do_otherwise_is_noted(tmp_path: Path) -> None:
    made = subject()
    query = "model.layers.0.self_attn.q_proj"
    assignment = {
        query: "q4_k",
        "lm_head": "q5_k",
        "model.embed_tokens": "q6_k",
        DOWN: "w8a16",
        UP.replace("11", "1"): "q4_0",
    }
    done = write(made, assignment | {"model.layers.0.self_attn:kv_cache": "kv-fp8"}, tmp_path / "out")
    lines = types(tmp_path / "out")
    assert lines[r"^blk\.0\.attn_q\.weight$"] == "q5_0"
    assert lines[r"^output\.weight$"] == "q5_1"
    assert lines[r"^token_embd\.weight$"] == "q8_0"
    assert done.parts[0].held == {UP.replace("11", "1"): "q4_0"}
    notes = "\n".join(done.notes)
    assert f"q4_k at {query}: rows of 128 aren't whole blocks: llama-quantize takes q5_0 instead" in notes
    assert f"w8a16 at {DOWN}: GGUF holds types of ggml, such as q4_k" in notes
    assert "kv-fp8 at model.layers.0.self_attn:kv_cache: llama.cpp's caches have types of their own" in notes
    router = next(name for name, site in sparse("mixtral").sites.items() if site.role == "router")
    done = write(sparse("mixtral"), {router: "q8_0"}, tmp_path / "router")
    assert any("leaves blk.0.ffn_gate_inp.weight as it is" in note for note in done.notes)
    assert done.paths == ()


def test_what_stays_is_known_beforehand() -> None:
    made = sparse("mixtral")
    alone = unexportable(made.model, made.sites, ["gguf"])
    assert {made.sites[name].role for name in alone} == {"router"}
    assert {made.sites[name].type for name in unexportable(made.model, made.sites, ["gguf", "vllm"])} >= {"embedding"}
    assert unexportable(made.model, made.sites, []) == []


def test_commands_name_the_files_and_the_bytes(tmp_path: Path) -> None:
    made = subject()
    assignment = made.weights("q4_0") | {"lm_head": "q8_0"}
    write(made, assignment, tmp_path / "out", source="some/model")
    size, *words = (tmp_path / "out" / "gguf.txt").read_text().splitlines()
    convert, quantise, base, judge = map(shlex.split, words)
    assert convert[:3] == ["python", "convert_hf_to_gguf.py", "some/model"]
    expected = (
        "llama-quantize --imatrix gguf-imatrix.gguf --tensor-type-file gguf-types.txt model-bf16.gguf model.gguf Q4_0"
    )
    assert shlex.join(quantise) == expected
    assert base[-2:] == ["--kl-divergence-base", "logits.kld"]
    assert judge[-1] == "--kl-divergence"
    total = 0
    for name, parameter in tensors(made).items():
        kind = {"output.weight": "q8_0", "token_embd.weight": ""}.get(name, "q4_0")
        if parameter.dim() < 2:
            total += parameter.numel() * 4
        else:
            block, each = (1, 2) if not kind else (block_types()[kind].block, block_types()[kind].bytes)
            total += parameter.numel() // block * each
    assert size.startswith(f"# tensors of {total:,} bytes")


def test_an_architecture_that_gguf_has_not_is_named(tmp_path: Path) -> None:
    config = transformers.ViTConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(CannotExport, match=r"whose architecture gguf .* has names for, got 'vit'"):
        TensorNames(transformers.ViTModel(config))
    torch.manual_seed(1)
    made = Subject.of(subject().model, IDS)
    made.model.config.model_type, kept = "unheard", made.model.config.model_type
    try:
        done = write(made, {"lm_head": "q8_0"}, tmp_path / "out")
    finally:
        made.model.config.model_type = kept
    assert done.paths == ()
    assert any("q8_0 at lm_head: expected a model whose architecture" in note for note in done.notes)
