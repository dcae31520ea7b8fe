"""`assay audit`: files and lines that it gives, and exit statuses."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from inspect import getsource, signature
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.audit import Stages
from assay.cli.audit import audit as command
from assay.cli.audit_options import Pace, bytes_of
from assay.cli.main import main
from assay.cli.progress import ProgressBar
from assay.precision.auditing import Audit, audit
from assay.precision.observation.streaming import streamed_parameters
from assay.precision.units import format_seconds
from assay.runtime.environment import changes, environment, put
from assay.runtime.errors import AssayError
from assay.runtime.sandbox import unavailable
from tests.cli.audits import FEW, LIMITED, line, read, run
from tests.precision.tiny_models import MODELS

EXPORTS = "torchao,compressed-tensors"
"""Those of the audit that is shared."""


def test_an_audit_writes_its_answer(audited: Path) -> None:
    content = read(audited)
    chosen = content["recommended"]
    assert chosen["met"]
    assert 0 < chosen["measured"] <= 0.01
    assert chosen["bytes"] < content["untouched"]["bytes"]
    assert content["settings"]["budgets"] == {"error": 0.01}
    assert "<title>assay audit: llama</title>" in (audited / "report.html").read_text()
    assert set(chosen["assignment"].values()) <= {"fp8", "w8a16", "w4a16-g32"}
    names = ["export.json", "quantization_config.json", "torchao-transformers.json", "torchao.json"]
    assert sorted(path.name for path in (audited / "export").iterdir()) == names
    assert [part["format"] for part in content["exports"]] == ["torchao", "compressed-tensors"]
    assert not list(audited.rglob(".*"))


@pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")
def test_another_user_who_can_write_one_folder_alone_measures_the_same_bits(
    models: Path, audited: Path, tmp_path: Path
) -> None:
    """Not root, packages read-only, another default dtype and hash seed."""
    locked = ["bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--ro-bind", "/", "/"]
    locked += ["--dev", "/dev", "--proc", "/proc", "--bind", str(tmp_path), str(tmp_path)]
    text = "import sys, torch; torch.set_default_dtype(torch.float64)\n"
    text += "from assay.cli.main import main; sys.exit(main(sys.argv[1:]))"
    audit = (*line(models, tmp_path / "out", "--quick", "--max-kl", "1"), "--formats", "fp8")
    own = {name: str(tmp_path) for name in ("HOME", "TMPDIR", "TRITON_CACHE_DIR")}
    environment = {**os.environ, **own, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    command = [*locked, sys.executable, "-P", "-c", text, *audit]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    own_results, others = read(tmp_path / "out"), read(audited)
    assert own_results["noise_floor"] == others["noise_floor"]
    assert own_results["untouched"]["bytes"] == others["untouched"]["bytes"]
    assert fp8_of(own_results) == fp8_of(others)


def fp8_of(content: dict[str, Any]) -> list[float]:
    """The measured errors of float8 at every linear."""
    return [each["measured"] for each in content["baselines"] if each["name"].startswith("fp8 at every linear")]


def test_errors_over_positions_are_reported_with_a_context(
    models: Path, audited: Path, again: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A curve up to that position, or the reason why there is none; bytes and times are of the context in any case."""
    curve = '<figure class="chart" id="positions"'
    assert read(audited)["positions"] is None
    assert curve not in (audited / "report.html").read_text()
    assert run(models, again, *LIMITED, "--context", "32") == 0
    content = read(again)
    assert content["positions"]["steps"][-1]["end"] == content["settings"]["context"] == 32
    assert content["positions"]["growth"] > 0
    page = (again / "report.html").read_text()
    assert "Over positions" in page
    assert curve in page
    capsys.readouterr()
    assert run(models, again, *LIMITED, "--context", "100000") == 0
    assert "assay: no error over positions: " in capsys.readouterr().err
    content = read(again)
    assert (content["positions"], content["settings"]["context"]) == (None, 100000)


def test_an_audit_runs_in_the_standard_environment(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[dict[str, Any], str]] = []

    def looks(*_: Any, **__: Any) -> None:
        seen.append((changes(), torch.get_default_device().type))
        raise AssayError("seen")

    monkeypatch.setattr("assay.cli.audit.loaded_of", looks)
    before = environment()
    torch.set_default_dtype(torch.float64)
    torch.set_autocast_enabled("cpu", True)
    try:
        with torch.device("meta"):
            assert run(models, tmp_path) == 2
    finally:
        put(before)
    assert seen == [({}, "cpu")]


def test_a_resumed_audit_gives_the_same_answer(
    models: Path, audited: Path, again: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same folder nothing is differentiated or measured again; with other settings a line says that nothing of
    the folder is used."""
    with monkeypatch.context() as patched:
        patched.setattr("assay.precision.prediction.simulation.Simulator", None)
        patched.setattr("assay.precision.auditing.differentiate", None)
        assert run(models, again, *LIMITED, "--export", EXPORTS) == 0
    out_text, err = capsys.readouterr()
    assert "of the errors were measured before" in err
    assert "nothing is taken from it" not in err
    assert out_text.startswith("MET  llama: ")
    assert ": weights take" in out_text.splitlines()[0]
    assert read(again)["recommended"] == read(audited)["recommended"]
    assert run(models, again, *LIMITED, "--seed", "1") == 0
    assert f"{again / 'kept'} is of another model, text," in capsys.readouterr().err


def test_a_model_larger_than_the_memory_is_audited(
    models: Path, audited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_line: Callable[..., None]
) -> None:
    """Under --max-memory below the model's size weights are read when they are needed; the answer is the same."""
    streamed: list[int] = []
    before = Audit.recommend

    def noted(self: Audit, *budgets: Any, **others: Any) -> Any:
        streamed.append(len(streamed_parameters(self.model)))
        return before(self, *budgets, **others)

    monkeypatch.setattr(Audit, "recommend", noted)
    few = (*LIMITED, "--export", EXPORTS, "--max-memory", "30kB")
    assert run(models, tmp_path / "out", *few) == 0
    assert streamed[0] > 0
    assert read(tmp_path / "out")["recommended"] == read(audited)["recommended"]
    refused = line(models, tmp_path / "other", *few, "--checkpoint")
    one_line(refused, "--checkpoint is written from weights in memory")


def test_an_interrupted_audit_goes_on(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: Audit, *budgets: object, **_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Audit, "recommend", stop)
        assert run(models, tmp_path / "out", "--target", "h200") == 130
    assert not (tmp_path / "out" / "audit.json").exists()
    assert f"stopped; what was measured is in {tmp_path / 'out' / 'kept'}, and is reused" in capsys.readouterr().err
    assert run(models, tmp_path / "out", "--target", "h200") == 0
    (reused,) = re.findall(r"(\d+) of the errors were measured before", capsys.readouterr().err)
    assert int(reused) >= 20


def test_a_budget_that_cannot_be_met_gives_1(models: Path, again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models, again, "--max-kl", "1e-9", "--max-bytes", "30kB", "--target", "h200") == 1
    said = capsys.readouterr().out
    assert said.startswith("NOT MET  ")
    assert "max_error and max_bytes can't be kept together" in said
    assert "max_decode" not in said
    assert "NOT kept" in said
    assert not read(again)["recommended"]["met"]


def test_without_a_budget_the_weights_are_halved(models: Path, again: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(models, again, "--target", "h200") == 0
    content = read(again)
    assert "kept (half of the model's, since no budget was given)" in capsys.readouterr().out
    assert all(isinstance(content[key]["bytes"], int) for key in ("untouched", "recommended"))
    assert content["settings"]["budgets"] == {"bytes": content["untouched"]["bytes"] / 2}
    assert content["recommended"]["bytes"] <= content["untouched"]["bytes"] / 2


def test_two_assignments_are_compared(
    models: Path, audited: Path, again: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rough.json").write_text('{"lm_head": "w4a16-g32", "model.layers.0.mlp.up_proj": "w4a16-g32"}')
    files_ = (str(tmp_path / "rough.json"), str(audited / "audit.json"))
    assert run(models, again, "--target", "h200", "--compare", *files_) == 0
    said = capsys.readouterr().out
    found = json.loads((again / "compare.json").read_text())
    assert found["words"] in said
    assert [one["name"] for one in found["compared"]] == list(files_)
    errors = [one["measured"] for one in found["compared"]]
    gap = found["difference"]
    assert gap["error"] == pytest.approx(errors[0] - errors[1], rel=1e-4, abs=1e-9)
    if found["better"] is None:
        assert gap["low"] <= 0 <= gap["high"] or abs(gap["error"]) <= found["noise_floor"]
    else:
        assert gap["low"] > 0 or gap["high"] < 0
        assert found["better"] == files_[errors.index(min(errors))]
        assert abs(errors[0] - errors[1]) > found["noise_floor"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("800MB", 8e8), ("3.2GB", 3.2e9), ("1.5GiB", 1.5 * 2**30), ("12345", 12345.0), ("2e9", 2e9), ("7 kb", 7e3)],
)
def test_sizes_are_read(text: str, size: float) -> None:
    assert bytes_of("--max-bytes", text) == size


def test_the_guide_names_every_option_and_every_public_name() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    for option in set(signature(command).parameters) - {"model"}:
        assert f"--{option.replace('_', '-')}" in guide
    words = set(re.findall(r"\w+", " ".join(re.findall("`[^`\n]+`", guide))))
    attributes = re.findall(r"self\.([a-z]\w*)", getsource(Audit.__init__))
    assert {"observed", "measured"} <= set(attributes)
    for name in (*signature(audit).parameters, *vars(Audit), *attributes):
        assert name in words or name.startswith("_"), name


def test_each_stage_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int | str]] = []

    class Told(ProgressBar):
        def __init__(self, label: str, count: int) -> None:
            super().__init__(label, count)
            seen.append((label, count))

        def __exit__(self, *error: object) -> None:
            seen.append((self.label, "ended"))

    monkeypatch.setattr("assay.cli.audit.ProgressBar", Told)
    with Stages() as stages:
        for done in (1, 2):
            stages("looking", done, 2)
        stages("measuring", 1, 3)
    assert seen == [("looking", 2), ("looking", "ended"), ("measuring", 3), ("measuring", "ended")]


def test_an_encoder_has_a_pass_and_no_decode_step(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = shutil.copytree(models, tmp_path / "home")
    shutil.rmtree(home / "llama", ignore_errors=True)
    model = MODELS["bert"]()
    model.save_pretrained(home / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models / "llama" / file, home / "llama")
    out = tmp_path / "out"
    assert run(home, out, "--target", "h200", "--max-time", "1000", "--max-kl", "0.5") == 0
    content, said = read(out), capsys.readouterr().out
    for cost in (content["untouched"], content["recommended"], *content["pareto"]):
        assert cost["kv_bytes"] is cost["decode"] is None
    assert "decode" not in said
    assert "KV cache" not in said
    assert f"time of at most 1 s: {format_seconds(content['recommended']['prefill'])}, kept" in said
    assert "decode step" not in (out / "report.html").read_text().partition("<script")[0]


def test_a_budget_of_seconds_limits_the_measurements(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], one_line: Callable[..., None]
) -> None:
    assert run(models, tmp_path / "out", "--max-kl", "0.01", "--budget", "0.01") == 0
    assert "the least takes" in capsys.readouterr().err
    assert len(read(tmp_path / "out")["calibration"]) == 6
    pace = Pace(choice=0.1, held_out=0.05)
    counts = [pace.within(seconds).count for seconds in (0.0, 10.0, 15.0, 20.0, 1000.0)]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (6, 96)
    assert all(pace.left(pace.within(seconds)) <= seconds for seconds in (10.0, 15.0, 20.0, 1000.0))
    refused = line(models, tmp_path / "out", "--quick", "--budget", "5")
    one_line(refused, "--quick and --budget both say how much is measured")


def test_a_quick_audit_without_a_target_promises_less_and_has_no_times(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    one_line: Callable[..., None],
) -> None:
    """It takes half of the trials, announces its duration, and intervals say what they promise. Without a target no
    device is assumed: times are null in audit.json, and a budget of time needs a device."""
    monkeypatch.setattr("assay.cli.audit.pace_of", lambda *_: Pace(choice=1.0, held_out=0.5))
    out = tmp_path / "out"
    assert run(models, out, "--max-kl", "0.01", "--quick") == 0
    said, err = capsys.readouterr()
    assert re.search(r"assay: takes about \d+ s", err)
    content = read(out)
    assert len(content["calibration"]) == 10
    level = content["recommended"]["prediction"]["level"]
    assert 0.8 < level < 0.95
    assert f"({int(100 * level)} %: " in said
    assert content["device"] is None
    assert {content["untouched"]["prefill"], content["recommended"]["decode"]} == {None}
    assert not re.search("prefill|decode|h100", said)
    assert "at least" not in (out / "report.html").read_text().split('<script id="data"')[0]
    one_line(line(models, out, "--max-time", "1"), "--max-time is of a device, and none is assumed")


def test_a_factory_with_a_tokenizer_is_audited(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_models.py").write_text(
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\n"
        f"def small():\n    home = {str(models / 'llama')!r}\n"
        "    return AutoModelForCausalLM.from_pretrained(home), AutoTokenizer.from_pretrained(home)\n\n\n"
        "def bare():\n    return small()[0]\n\n\ndef wrong():\n    return small()[0], 'tokenizer'\n"
    )
    monkeypatch.chdir(tmp_path)
    text = ("--text", str(models / "text.txt"), "--out", "out", *FEW, "--quick", "--max-kl", "0.01")
    assert main(("audit", "my_models:small", *text)) == 0
    assert read(Path("out"))["model"]["kind"] == "module"
    for name, says in (("bare", "has no tokenizer"), ("wrong", "expected a tokenizer of transformers")):
        assert main(("audit", f"my_models:{name}", *text)) == 2
        assert says in capsys.readouterr().err
