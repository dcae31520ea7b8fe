"""Exports are read again by their readers' own classes: each linear gets what the assignment has, or it is told."""

import json
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.precision.errors import CannotExport
from assay.precision.export import export, verify_export
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
    export(made.model, mixed(), out, FORMATS, sites=made.sites, fits=made.fits, checkpoint=True)
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
    export(
        made.model, chosen, tmp_path / "out", ["compressed-tensors"], sites=made.sites, fits=made.fits, checkpoint=True
    )
    found = verify_export(tmp_path / "out")
    assert [each.wrong for each in found] == [(), ()]
    assert found[0].checked >= 2 * 4 * 3


def test_a_folder_without_an_export_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotExport, match=r"has no export\.json that names linears: give the folder of an export"):
        verify_export(tmp_path)
    assert main(("audit", "--verify-export", str(tmp_path))) == 2
    assert capsys.readouterr().err.count("\n") == 1
