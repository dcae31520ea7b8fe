"""Exports are read again by their readers' own classes: each linear gets what the assignment has, or it is told.

What llama-quantize and mlx_lm are given, and what they make of it, is read again beside the assignment.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import mlx.core
import mlx.nn
import pytest

from assay.cli.main import main
from assay.precision.errors import CannotExport
from assay.precision.export import verify_export
from assay.precision.export.configurations.mlx import layers_in
from tests.precision.exported import subject
from tests.precision.test_export_experts import experts, sparse

FORMATS = ["compressed-tensors", "torchao", "vllm"]


def mixed() -> dict[str, str]:
    """FP8 in the first layer, integers in the second, and one linear as it is."""
    weights = subject().weights("fp8")
    second = {name: "w4a16-g64" for name in weights if "layers.1" in name}
    chosen = {**weights, **second}
    del chosen["model.layers.0.mlp.down_proj"]
    return chosen


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of it, with a checkpoint."""
    out, made = tmp_path_factory.mktemp("verified") / "out", subject()
    made.export(mixed(), out, FORMATS, checkpoint=True)
    return out


def test_each_linear_gets_what_it_was_to_get(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.file: each for each in verify_export(folder)}
    assert found.keys() == {"quantization_config.json", "checkpoint/config.json", "torchao.json", "vllm.json"}
    assert all(each.wrong == () for each in found.values())
    assert {name for name, each in found.items() if not each.reader} == {"vllm.json"}
    assert found["checkpoint/config.json"].checked == sum(
        s.type in ("linear", "embedding") for s in subject().sites.values()
    )
    assert main(("audit", "--verify-export", str(folder))) == 0
    said = capsys.readouterr().out
    assert "torchao.json: 16 layers get what they were to get (torchao" in said
    assert "vllm.json: not verified, no reader of it is installed" in said


def test_a_linear_that_gets_another_scheme_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = folder / "quantization_config.json", {}
    for file in ("quantization_config.json", "torchao.json"):
        kept[file] = (folder / file).read_text()
    content = json.loads(kept["quantization_config.json"])
    content["ignore"].append("model.layers.0.self_attn.q_proj")
    content["ignore"].remove("lm_head")
    content["config_groups"]["group_000"]["targets"].append("lm_head")
    path.write_text(json.dumps(content))
    table = json.loads(kept["torchao.json"])
    for each in ("fqn_to_config", "module_fqn_to_config"):
        table["_data"][each]["model.layers.1.self_attn.o_proj"] = None
    (folder / "torchao.json").write_text(json.dumps(table))
    try:
        assert main(("audit", "--verify-export", str(folder))) == 1
        said = capsys.readouterr().out
    finally:
        for file, text in kept.items():
            (folder / file).write_text(text)
    assert "model.layers.0.self_attn.q_proj: expected fp8, gets none" in said
    assert "model.layers.0.self_attn.qkv_proj: expected fp8, gets none" in said
    assert "lm_head: expected none, gets " in said
    assert "torchao.json: 1 lines differ, of 16 layers" in said
    assert "model.layers.1.self_attn.o_proj: expected w4a16-g64, gets none" in said


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
def test_experts_are_verified_by_the_names_of_checkpoints(kind: str, tmp_path: Path) -> None:
    made = sparse(kind)
    chosen = {**experts(made, "fp8"), "lm_head": "w8a16"}
    made.export(chosen, tmp_path / "out", ["compressed-tensors"], checkpoint=True)
    found = verify_export(tmp_path / "out")
    assert [each.wrong for each in found] == [(), ()]
    assert found[0].checked >= 2 * 4 * 3


def test_a_folder_without_an_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotExport, match=r"has no export\.json that names linears: give the folder of an export"):
        verify_export(tmp_path)
    assert main(("audit", "--verify-export", str(tmp_path))) == 2
    assert capsys.readouterr().err.count("\n") == 1


DOWN, UP, QUERY = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
FOR_LLAMA = {DOWN: "q4_k", UP: "q8_0", QUERY: "q4_k", "lm_head": "q5_0", "model.embed_tokens": "iq4_nl"}
"""Rows of 128 aren't whole blocks of q4_k: of QUERY llama-quantize takes q5_0 instead."""
FOR_MLX = {DOWN: "w4a16-g64-asym", UP: "w-mxfp4", QUERY: "w-nvfp4", "lm_head": "w4a16-g32-asym"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export for each of two stacks."""
    home, assignments = tmp_path_factory.mktemp("exported"), {"gguf": FOR_LLAMA, "mlx": FOR_MLX}
    for format, assignment in assignments.items():
        subject().export(assignment, home / format, [format])
    return {format: home / format for format in assignments}


@pytest.fixture
def for_llama_cpp(exported: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(exported["gguf"], tmp_path / "out")


@pytest.fixture
def for_mlx(exported: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(exported["mlx"], tmp_path / "out")


def verdicts(folder: Path) -> dict[str, tuple[str, ...]]:
    """What is wrong with each file."""
    return {each.file: each.wrong for each in verify_export(folder)}


def quantised(out: Path, **changes: str) -> None:
    """The file that llama-quantize would make, by ggml's own code, with other types where changed."""
    made, path = subject(), out / "model.gguf"
    chosen = {**{name: scheme for name, scheme in FOR_LLAMA.items() if name != QUERY}, QUERY: "q5_0", **changes}
    made.gguf(chosen, path)


def converted(out: Path, layers: dict[str, dict[str, Any]]) -> Path:
    """The folder that mlx_lm would make, by MLX's own code: tensors, and the parameters in config.json."""
    folder = out / "mlx_model"
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, site in subject().sites.items():
        if site.type in ("linear", "embedding"):
            weight = mlx.core.array(subject().model.get_parameter(f"{name}.weight").detach().numpy())
            parts = mlx.core.quantize(weight, **layers[name]) if name in layers else (weight,)
            tensors |= {
                f"{name}.{part}": each for part, each in zip(("weight", "scales", "biases"), parts, strict=False)
            }
    mlx.core.save_safetensors(str(folder / "model.safetensors"), tensors)
    usual = {"group_size": 32, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps({"quantization": {**usual, **layers}}))
    return folder


def test_every_tensor_of_a_gguf_export_gets_its_type(for_llama_cpp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Types, importance matrix and the file that llama-quantize makes are read as meant; rows that aren't whole blocks
    may have the type that it takes instead."""
    quantised(for_llama_cpp)
    assert verdicts(for_llama_cpp) == {"gguf-types.txt": (), "gguf-imatrix.gguf": (), "model.gguf": ()}
    assert main(("audit", "--verify-export", str(for_llama_cpp))) == 0
    said = capsys.readouterr().out
    assert "gguf-types.txt: 16 layers get what they were to get (llama-quantize's rules, types of gguf " in said
    assert "model.gguf: 16 layers get what they were to get (gguf " in said


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda text: text.replace("=q4_k", "=q6_k"),
            rf"{re.escape(DOWN)} \(blk.0.ffn_down.weight\): expected q4_k, gets q6_k",
        ),
        (
            lambda text: "".join(line for line in text.splitlines(True) if "token_embd" not in line),
            "expected iq4_nl, gets none",
        ),
        (lambda text: text + "attn_v=q8_0\n", r"attn_v.weight\): expected none, gets bf16 and q8_0"),
        (lambda text: text.replace("=q8_0", "=q7_0"), "ValueError: expected types of ggml, got .*=q7_0"),
        (lambda text: text + "(=q8_0\n", "is no regular expression"),
        (lambda text: text + "\n", "its bytes aren't those that were written: export anew"),
    ],
)
def test_an_edited_file_of_types_is_told(edit: Callable[[str], str], words: str, for_llama_cpp: Path) -> None:
    path = for_llama_cpp / "gguf-types.txt"
    path.write_text(edit(path.read_text()))
    assert re.search(words, "\n".join(verdicts(for_llama_cpp)["gguf-types.txt"]))


def test_a_gguf_file_with_other_types_is_told(for_llama_cpp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantised(for_llama_cpp, **{UP: "q5_0", "model.layers.1.self_attn.v_proj": "q8_0"})
    assert main(("audit", "--verify-export", str(for_llama_cpp))) == 1
    said = capsys.readouterr().out
    assert "model.gguf: 2 lines differ, of 16 layers" in said
    assert f"{UP} (blk.1.ffn_up.weight): expected q8_0, gets q5_0" in said
    assert "model.layers.1.self_attn.v_proj (blk.1.attn_v.weight): expected none, gets q8_0" in said


def test_damaged_files_for_llama_cpp_are_told(for_llama_cpp: Path) -> None:
    quantised(for_llama_cpp)
    for name in ("gguf-imatrix.gguf", "model.gguf"):
        (for_llama_cpp / name).write_bytes((for_llama_cpp / name).read_bytes()[:4000])
    (for_llama_cpp / "gguf.txt").write_text(
        (for_llama_cpp / "gguf.txt").read_text().replace("--imatrix", "--pure --imatrix")
    )
    found = verdicts(for_llama_cpp)
    assert found["gguf-types.txt"] == ()
    assert all(found[name] for name in ("gguf-imatrix.gguf", "model.gguf"))
    assert found["gguf.txt"] == ("its bytes aren't those that were written: export anew",)
    (for_llama_cpp / "gguf.txt").unlink()
    assert verdicts(for_llama_cpp)["gguf.txt"] == ("it is missing: export anew",)
    writer = gguf.GGUFWriter(for_llama_cpp / "gguf-imatrix.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    lines = verdicts(for_llama_cpp)["gguf-imatrix.gguf"]
    assert f"{DOWN}: expected sums of squares of its inputs for blk.0.ffn_down.weight, finite, with a count" in lines
    assert len(lines) == len(FOR_LLAMA) - 2  # the table has no inputs, and QUERY no whole blocks


def test_experts_and_routers_of_a_mixture_are_verified(tmp_path: Path) -> None:
    made = sparse("mixtral")
    made.export(experts(made, "q4_0"), tmp_path / "out", ["gguf"])
    assert verdicts(tmp_path / "out") == {"gguf-types.txt": (), "gguf-imatrix.gguf": ()}


def test_every_layer_of_an_mlx_export_gets_its_parameters(for_mlx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted(for_mlx, layers_in((for_mlx / "mlx_convert.py").read_text()))
    assert verdicts(for_mlx) == {"mlx_convert.py": (), "mlx_model": ()}
    assert main(("audit", "--verify-export", str(for_mlx))) == 0
    assert "mlx_model: 16 layers get what they were to get (mlx " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("'bits': 4, 'mode': 'mxfp4'", "'bits': 8, 'mode': 'mxfp8'", f"{UP}: expected w-mxfp4, gets .*'mode': 'mxfp8'"),
        (repr(DOWN), repr(DOWN.replace("0", "1")), f"{DOWN}: expected w4a16-g64-asym, gets none"),
        ("'group_size': 64", "'group_size': 48", "ValueError: .* divisible by the quantization group size 48"),
        ("LAYERS = {", "LAYERS = {{", "SyntaxError"),
        ("LAYERS = {", "TABLE = {", "ValueError: expected LAYERS in it, got none"),
        ("mlx_model", "elsewhere", "its bytes aren't those that were written: export anew"),
    ],
)
def test_an_edited_program_for_mlx_is_told(old: str, new: str, words: str, for_mlx: Path) -> None:
    path = for_mlx / "mlx_convert.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert re.search(words, "\n".join(verdicts(for_mlx)["mlx_convert.py"]))


def test_a_folder_of_mlx_that_is_another_is_told(for_mlx: Path) -> None:
    layers = layers_in((for_mlx / "mlx_convert.py").read_text())
    value = "model.layers.1.self_attn.v_proj"
    folder = converted(for_mlx, {**layers, value: layers[DOWN], UP: layers[DOWN]})
    lines = verdicts(for_mlx)["mlx_model"]
    assert len(lines) == 2
    assert any(line.startswith(f"{value}: expected none, gets {{'group_size': 64") for line in lines)
    assert any(line.startswith(f"{UP}: expected w-mxfp4, gets ") for line in lines)
    folder = converted(for_mlx, layers)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"][DOWN]["bits"] = 8
    (folder / "config.json").write_text(json.dumps(config))
    lines = verdicts(for_mlx)["mlx_model"]
    assert any(line.startswith(f"{DOWN}: MLX can't read its tensors (") for line in lines)
    (folder / "config.json").unlink()
    assert verdicts(for_mlx)["mlx_model"][0].endswith("config.json: can't be read (No such file or directory)")


def test_tensors_of_a_checkpoint_that_were_changed_are_told(tmp_path: Path) -> None:
    made = subject()
    out = tmp_path / "out"
    made.export({UP: "fp8"}, out, [], checkpoint=True)
    assert verdicts(out) == {"checkpoint/config.json": ()}
    (file,) = (out / "checkpoint").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = verdicts(out)
    assert found["checkpoint/config.json"] == ()
    assert found[f"checkpoint/{file.name}"] == ("its bytes aren't those that were written: export anew",)
