"""The rows of engines: what they say agrees with what exports write, and bounds menus place by place."""

import pytest
import torch

from assay.formats.errors import UnknownOption
from assay.precision.auditing import audit
from assay.precision.choice.roofline import device_named, devices
from assay.precision.errors import UnknownDevice
from assay.precision.export import allow_unfused, offered
from assay.precision.export.configurations import TARGETS
from assay.precision.export.configurations.compressed_tensors import format_of
from assay.precision.observation.sites import Site
from assay.precision.schemes import SCHEMES
from assay.precision.targets import engines, formats_of, target_named
from tests.precision.exported import IDS, subject

READERS = [name for name, engine in engines().items() if "compressed-tensors" in engine.exports]


@pytest.mark.parametrize("name", READERS)
def test_the_stored_format_of_a_row_is_what_is_written(name: str) -> None:
    for scheme, kernel in engines()[name].kernels.items():
        reader = "vllm" if kernel.stored.startswith("--") else "compressed-tensors"
        assert TARGETS[reader].lacks(SCHEMES[scheme]) == ""
        if SCHEMES[scheme].weight is not None:
            assert format_of(SCHEMES[scheme]) == kernel.stored, scheme


@pytest.mark.parametrize("name", engines())
def test_a_row_has_a_version_a_source_and_known_names(name: str) -> None:
    engine = engines()[name]
    assert engine.version
    assert engine.source
    assert engine.read.startswith("2026-")
    assert engine.exports
    assert set(engine.exports) <= set(TARGETS)
    assert all(set(names) <= {"*", *engine.kernels} for names in engine.schemes_by_kind.values())
    assert engine.caches in ("each", "some", "one", "none")
    assert (engine.caches == "none") == (not any("kv_cache" in SCHEMES[s].site_types for s in engine.kernels))


@pytest.mark.parametrize(
    ("target", "scheme", "reason"),
    [
        ("vllm@h200", "nvfp4", "vllm computes nvfp4 from compute capability 10.0 on, and h200 has 9.0"),
        ("vllm@b200", "w4a8-fp8-g128", "up to compute capability 9.0, and b200 has 10.0"),
        ("vllm", "mxfp6", "and has no mxfp6"),
        ("tensorrt-llm@h200", "w8a8", "and has no w8a8"),
        ("tensorrt-llm@b200", "fp8", "up to compute capability 9.0, and b200 has 10.0"),
        ("sglang@a100", "fp8", "from compute capability 8.9 on, and a100 has 8.0"),
        ("h200", "mxfp4", "h200 has no fp4 products: mxfp4 runs in bf16"),
    ],
)
def test_a_format_that_the_target_lacks_is_refused_with_the_reason(target: str, scheme: str, reason: str) -> None:
    with pytest.raises(UnknownOption, match=f"format {scheme}: .*{reason}; leave it out"):
        formats_of([scheme], target)
    assert scheme not in formats_of(None, target)


def test_what_is_looked_at_for_an_engine_and_a_device_has_kernels_there() -> None:
    for name, engine in engines().items():
        for device in devices():
            try:
                found = formats_of(None, f"{name}@{device}")
            except UnknownDevice:
                assert engine.devices != "any"
                continue
            capability = device_named(device).capability
            kernels = [engine.kernels[scheme] for scheme in found]
            assert found
            assert engine.devices == "any" or all(k.least <= capability <= (k.most or 999) for k in kernels)


def test_places_have_what_the_engine_loads_there() -> None:
    vllm, plain = target_named("vllm"), target_named(None)
    router = Site("layers.0.gate", "linear", "router", (8, 64))
    table = Site("embed_tokens", "embedding", "embedding", (64, 64))
    experts = Site("layers.0.experts.3.w1", "linear", "linear", (64, 64))
    linear = Site("layers.0.o_proj", "linear", "linear", (64, 64))
    for site, scheme, allowed in (
        (router, "fp8", False),
        (table, "w8a16", True),
        (table, "fp8", False),
        (experts, "w4a16-g32-asym", False),
        (experts, "w4a16-g32", True),
        (linear, "w4a16-g32-asym", True),
    ):
        assert vllm.allows(site, scheme) == allowed
        assert plain.allows(site, scheme)
    assert target_named("transformers").allows(router, "fp8")
    assert not target_named("sglang").allows(linear, "fp8-block", head=True)


def test_the_caches_of_an_engine_with_one_scheme_for_all_are_chosen_together() -> None:
    """For SGLang KV caches are one unit, for vLLM where they could have two schemes; otherwise layers have their own.
    Activations and routers have no menu."""
    batches = [{"input_ids": IDS}]

    def units(target: str, *caches: str) -> list[str]:
        found = audit(subject().model, batches, formats=["fp8", *caches], target=target)
        return sorted({site.unit for site in found.sites if site.type == "kv_cache"})

    assert units("sglang@h200", "kv-fp8") == units("vllm@h200", "kv-fp8", "kv-int8") == ["kv_cache"]
    assert units("vllm@h200", "kv-int8") == [f"model.layers.{layer}.self_attn:kv_cache" for layer in (0, 1)]
    found = audit(subject().model, batches, formats=["fp8", "w8a16", "kv-fp8"], target="vllm@h200")
    assert {site.type for site in found.sites} == {"linear", "embedding", "kv_cache"}
    layer = "model.layers.0.self_attn"
    assert {site.unit for site in found.sites if str(site).startswith(f"{layer}.") and "o_proj" not in site} == {
        f"{layer}.qkv"
    }


def test_exports_bound_what_is_chosen() -> None:
    assert set(offered(None, "h200", ["vllm"])) == {"fp8", "fp8-block", "kv-fp8", "kv-int8"}
    assert offered(["fp8", "w8a16", "kv-fp8"], "h200", ["torchao"], checkpoint=True) == ("fp8", "w8a16")
    assert offered(None, None, ["gguf"]) == engines()["llama.cpp"].schemes
    with pytest.raises(UnknownOption, match="sglang reads no torchao: take its compressed-tensors"):
        offered(None, "sglang", ["torchao"])
    with pytest.raises(UnknownOption, match="no format is in all of gguf, vllm"):
        offered(None, None, ["gguf", "vllm"])
    assert allow_unfused(None, ["gguf", "mlx"]) is True
    assert (
        allow_unfused(None, ["gguf", "compressed-tensors"])
        is allow_unfused("vllm", ["compressed-tensors"])
        is allow_unfused(None, [])
        is None
    )


def test_an_audit_is_limited_to_what_exports_hold() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    found = audit(model, [torch.randn(2, 4, 32)], "relative", formats=["bf16", "fp8", "w8a16"])
    found.calibrate(4)
    found.limit(["w8a16"])
    assert {found.menu(site) for site in found.sites if site.type == "linear"} == {("w8a16",)}
    assert set(found.recommend(max_error=0.5).values()) == {"w8a16"}
    assert found.predict({"0": "fp8"}).error > 0
