"""KV caches of some layers: vLLM leaves layers out by their number, beside a checkpoint with scales for the others."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from assay.formats.errors import UnknownOption
from assay.precision.export import Exported, load_checkpoint, verify_export
from assay.precision.export.configurations.vllm import cache_options, command_line
from assay.precision.export.plan import plan_of
from assay.precision.observation.sites import Site
from assay.precision.report.summary import next_steps
from assay.precision.targets import formats_of
from tests.precision.exported import IDS, Subject, subject

CACHES = [f"model.layers.{layer}.self_attn:kv_cache" for layer in (0, 1)]
DOWN = "model.layers.0.mlp.down_proj"


def written(made: Subject, assignment: dict[str, str], out: Path, formats: list[str]) -> Exported:
    return made.export(assignment, out, formats, checkpoint=True)


def config(out: Path) -> dict[str, Any]:
    """The checkpoint's ``quantization_config``."""
    content: dict[str, Any] = json.loads((out / "checkpoint" / "config.json").read_text())["quantization_config"]
    return content


def test_the_cache_of_one_layer_is_served_by_options(tmp_path: Path) -> None:
    """Its scales are in the checkpoint, whose configuration gives no cache a scheme; the command leaves out the other
    layer by its number, and a note says that other engines leave all as they are."""
    done = written(subject(), {DOWN: "fp8", CACHES[1]: "kv-fp8"}, tmp_path / "out", [])
    (part,) = done.parts
    assert part.held == {DOWN: "fp8", CACHES[1]: "kv-fp8"}
    assert config(tmp_path / "out")["kv_cache_scheme"] is None
    words = shlex.split((tmp_path / "out" / "vllm-checkpoint.txt").read_text())
    options = ["--kv-cache-dtype", "fp8_e4m3", "--kv-cache-dtype-skip-layers", "0"]
    assert words == ["vllm", "serve", "checkpoint", *options]
    assert part.paths == (tmp_path / "out" / "checkpoint", tmp_path / "out" / "vllm-checkpoint.txt")
    assert f"checkpoint: {CACHES[1]}: KV caches stay as they are but in vLLM with {' '.join(options)}" in done.notes
    tensors = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    assert {key for key in tensors if key.endswith(("k_scale", "v_scale"))} == {
        f"model.layers.1.self_attn.{part}_scale" for part in "kv"
    }
    assert [each.wrong for each in verify_export(tmp_path / "out")] == [()]
    with torch.no_grad():
        logits = load_checkpoint(tmp_path / "out" / "checkpoint")(IDS, use_cache=False).logits
    assert torch.equal(logits, load_and_run(subject(), {DOWN: "fp8"}, tmp_path / "without"))


def load_and_run(made: Subject, assignment: dict[str, str], out: Path) -> torch.Tensor:
    """Logits of a checkpoint of an assignment."""
    made.checkpoint(assignment, out)
    with torch.no_grad():
        return torch.as_tensor(load_checkpoint(out)(IDS, use_cache=False).logits)


def test_the_caches_of_all_layers_need_no_options(tmp_path: Path) -> None:
    done = written(
        subject(), {DOWN: "fp8", **dict.fromkeys(CACHES, "kv-fp8")}, tmp_path / "out", ["compressed-tensors"]
    )
    assert config(tmp_path / "out")["kv_cache_scheme"]["num_bits"] == 8
    assert not (tmp_path / "out" / "vllm-checkpoint.txt").exists()
    assert all(len(part.held) == 3 for part in done.parts)
    path = tmp_path / "out" / "quantization_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kv_cache_scheme": None}))
    (wrong,) = [each.wrong for each in verify_export(tmp_path / "out") if each.file == "quantization_config.json"]
    assert wrong == ("KV caches: expected kv-fp8, gets none",)


def test_a_cache_of_int8_has_scales_of_its_own(tmp_path: Path) -> None:
    given = {DOWN: "fp8", **dict.fromkeys(CACHES, "kv-int8")}
    done = written(subject(), given, tmp_path / "out", ["compressed-tensors"])
    held = {part.format: part.held for part in done.parts}
    assert held == {"compressed-tensors": {DOWN: "fp8"}, "checkpoint": given}
    assert (tmp_path / "out" / "vllm-checkpoint.txt").read_text() == (
        "vllm serve checkpoint --kv-cache-dtype int8_per_token_head\n"
    )
    tensors = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    assert not any(key.endswith("k_scale") for key in tensors)
    assert any(note.startswith(f"compressed-tensors: kv-int8 at {CACHES[0]}") for note in done.notes)


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ({CACHES[0]: "kv-fp8", CACHES[1]: "kv-int8"}, "vLLM takes one kind of cache, and layers by number"),
        (
            {CACHES[0]: "kv-int4"},
            "vLLM 0.33 rotates keys and values before it rounds them to int4, which wasn't simulated",
        ),
    ],
)
def test_what_vllm_does_not_serve_is_refused(caches: dict[str, str], reason: str, tmp_path: Path) -> None:
    done = written(subject(), {DOWN: "fp8", **caches}, tmp_path / "out", ["vllm"])
    assert all(part.held == {DOWN: "fp8"} for part in done.parts)
    assert not (tmp_path / "out" / "vllm-checkpoint.txt").exists()
    assert any(note.startswith("vllm: ") and reason in note for note in done.notes)


def test_layers_without_a_number_cannot_be_left_out() -> None:
    numbered = {name: Site(name, "kv_cache", "kv_cache") for name in ("h.4.attn:kv_cache", "h.9.attn:kv_cache")}
    given = {"h.4.attn:kv_cache": "kv-fp8"}
    assert cache_options(plan_of(given, numbered), numbered)[-2:] == ["--kv-cache-dtype-skip-layers", "9"]
    other = {**numbered, "attn:kv_cache": Site("attn:kv_cache", "kv_cache", "kv_cache")}
    assert cache_options(plan_of(given, other), other) == []
    assert command_line("some/model", given, other) == "vllm serve some/model"


def test_the_next_step_is_the_command_with_the_options() -> None:
    paths = ["out/export/checkpoint", "out/export/vllm-checkpoint.txt"]
    content = {
        "command": "assay audit model",
        "recommended": {"met": True, "interval": None},
        "settings": {"target": "vllm@h200"},
        "positions": None,
        "data": {"sequences": 1, "tokens": 1},
        "exports": [{"format": "checkpoint", "paths": paths}],
    }
    assert next_steps(content)[0][1] == "cd out/export && sh vllm-checkpoint.txt"
    content["exports"] = [{"format": "checkpoint", "paths": paths[:1]}]
    assert next_steps(content)[0][1] == "vllm serve out/export/checkpoint"


def test_a_broken_model_is_no_error_to_allow() -> None:
    content = {
        "command": "assay audit model --max-kl 0.01",
        "recommended": {"met": False, "measured": None, "interval": None},
        "settings": {"target": None, "budgets": {"error": 0.01}},
        "positions": None,
        "data": {"sequences": 1, "tokens": 1},
        "exports": [{"format": "gguf", "paths": ["out/export/model.txt"]}],
    }
    assert not [command for _, command in next_steps(content) if "--max-kl" in command.replace("--max-kl 0.01", "")]
    content["recommended"]["measured"] = 0.5
    assert "--max-kl 0.525" in next_steps(content)[0][1]


def test_menus_have_what_is_served() -> None:
    assert "kv-fp8" in formats_of(None, "vllm@h200")
    assert formats_of(["kv-int8"], "vllm@a100") == ("kv-int8",)
    with pytest.raises(UnknownOption, match="and has no kv-int4"):
        formats_of(["kv-int4"], "vllm@h200")
    with pytest.raises(UnknownOption, match="and has no kv-int8"):
        formats_of(["kv-int8"], "sglang@h200")
