"""Targets: engines, devices and both, and the schemes that each leaves to choose from."""

import pytest
import torch

from assay.cli.audit_options import check_names
from assay.formats.errors import UnknownOption
from assay.precision.auditing import audit
from assay.precision.choice.recommendation import groups_of
from assay.precision.errors import UnknownDevice, UnknownScheme
from assay.precision.export import lint
from assay.precision.observation.sites import EngineRules, Observer, Site
from assay.precision.schemes import SCHEMES
from assay.precision.schemes.scheme import DEFAULTS
from assay.precision.targets import engines, formats_of, target_named
from tests.precision.exported import subject
from tests.precision.small_models import Layer

LLAMA = engines()["llama.cpp"]


@pytest.mark.parametrize("engine", engines().values(), ids=list(engines()))
def test_rows_of_engines_name_schemes(engine: object) -> None:
    names = [*engine.schemes, *engine.on_request]  # type: ignore[attr-defined]
    assert set(names) <= set(SCHEMES)
    assert len(set(names)) == len(names)


def test_every_type_of_ggml_is_llama_cpp_s() -> None:
    assert set(LLAMA.kernels) == {name for name, scheme in SCHEMES.items() if scheme.weight and scheme.weight.blocks}


def test_a_target_is_an_engine_a_device_or_both() -> None:
    both = target_named("llama.cpp@H200")
    assert both.engine == LLAMA == target_named("Llama.cpp").engine
    assert both.device == target_named("h200").device
    assert target_named("llama.cpp").device is None
    assert target_named("h200").engine is None
    assert target_named(None) == target_named(None).__class__()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama.cpp", "unknown device or engine 'lama.cpp'; did you mean 'llama.cpp'"),
        ("h20", "unknown device or engine 'h20'; did you mean 'h200'"),
        ("h200@llama.cpp", "unknown engine 'h200'"),
        ("llama.cpp@h20", "unknown device 'h20'; did you mean 'h200'"),
        ("llama.cpp@", "unknown device ''"),
    ],
)
def test_an_unknown_target_is_told_with_what_is_near(name: str, words: str) -> None:
    with pytest.raises(UnknownDevice, match=words):
        target_named(name)


def test_formats_of_a_target() -> None:
    assert formats_of(None, "llama.cpp") == LLAMA.schemes
    assert formats_of(None, None) == DEFAULTS
    assert formats_of(["iq2_xs", "q4_k-q8_k", "q4_k"], "llama.cpp") == ("iq2_xs", "q4_k-q8_k", "q4_k")
    assert formats_of(["fp8", "w8a8"], "h200") == ("fp8", "w8a8")
    assert not {"nvfp4", "mxfp4", "mxfp8", "mxfp6"} & {*formats_of(None, "vllm@h200"), *formats_of(None, "h200")}
    assert {"nvfp4", "mxfp4", "mxfp8"} < set(formats_of(None, "vllm@b200"))
    assert "mxfp6" not in engines()["vllm"].kernels
    with pytest.raises(UnknownScheme, match="q4_k"):
        formats_of(["q4-k"], "llama.cpp")


def test_formats_that_a_target_lacks_are_refused_on_the_command_line() -> None:
    check_names(["q4_k"], "llama.cpp@h200", "kl")
    with pytest.raises(
        UnknownOption,
        match=r"--formats fp8: llama.cpp takes q8_0-q8_0, .*, and has no fp8; leave it out, or choose another",
    ):
        check_names(["q4_k", "fp8"], "llama.cpp", "kl")
    with pytest.raises(UnknownOption, match="--formats mxfp4: h200 has no fp4 products"):
        check_names(["mxfp4"], "h200", "kl")


def test_an_audit_for_an_engine() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(), Layer())
    found = audit(model, [torch.randn(2, 4, 32)], "relative", target="llama.cpp@a100")
    whole = tuple(name for name in LLAMA.schemes if (stored := SCHEMES[name].weight) and stored.size == 32)
    assert {found.menu(site) for site in found.sites} == {whole}
    assert {site.type for site in found.sites} == {"linear"}
    assert found.roofline.device.name == "a100"
    assert audit(model, [torch.randn(2, 4, 32)], "relative", target="llama.cpp").roofline.device is None


def test_lint_knows_what_an_engine_fuses() -> None:
    sites = {
        name: Site(name, "linear", "linear", (32, 32), unit="layers.0.qkv")
        for name in ("layers.0.q_proj", "layers.0.k_proj")
    }
    assert lint({"layers.0.q_proj": "q8_0", "layers.0.k_proj": "q4_0"}, sites, "llama.cpp") == []
    assert len(lint({"layers.0.q_proj": "q8_0", "layers.0.k_proj": "q4_0"}, sites)) == 1
    (line,) = lint({"layers.0.q_proj": "fp8", "layers.0.k_proj": "fp8"}, sites, "llama.cpp")
    assert "has no fp8, at layers.0.q_proj" in line


def test_an_engine_that_runs_each_linear_alone_may_give_each_a_scheme() -> None:
    ids = torch.arange(2 * 16).reshape(2, 16) % 64
    formats = ["q8_0", "q4_0"]
    made = {
        target: audit(subject().model, [{"input_ids": ids}], formats=formats, target=target)
        for target in (None, "llama.cpp")
    }
    layer = "model.layers.0.self_attn"
    units = {target: {str(site): site.unit for site in each.sites} for target, each in made.items()}
    assert units[None][f"{layer}.q_proj"] == units[None][f"{layer}.v_proj"] == f"{layer}.qkv"
    assert all(unit == name for name, unit in units["llama.cpp"].items())
    groups = {target: groups_of(each.predictor, each.roofline) for target, each in made.items()}
    assert len(groups["llama.cpp"]) == len(groups[None]) + 2 * 3  # two layers: k, v and up beside q and gate


def test_experts_that_are_modules_are_one_tensor_of_a_kind() -> None:
    observer = Observer(torch.nn.Module(), EngineRules(unfused=True))
    names = [f"layers.0.mlp.experts.{expert}.{part}" for expert in (0, 11) for part in ("w1", "w3")]
    units = [observer._unit(name) for name in names]
    assert units == ["layers.0.mlp.experts.*.w1", "layers.0.mlp.experts.*.w3"] * 2
