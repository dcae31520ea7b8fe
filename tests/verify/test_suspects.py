"""Suspects: each is a fault indeed, every reported bug has one, and an examination catches them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assay.golden import specs
from assay.verify import examine
from assay.verify.calls import Call, Finding
from assay.verify.inputs.cases import build
from assay.verify.suspects import suspects, suspects_of
from assay.verify.suspects.evaluation import kernel_of
from assay.verify.suspects.suspect import FAMILIES, Suspect
from assay.verify.suspects.usual import usual
from assay.verify.trial import same_bits

from .suspicion import drawn, names, pairs, settings_for

REPORTED = (
    "cutlass#2336", "flash-attention#282", "triton#621", "flash-attention#2552", "flash-attention#2541",
    "flash-attention#443", "flash-attention#2842", "flashinfer#4401", "flashinfer#4051", "vllm#47079",
    "sgl-kernel-xpu#491", "vllm#936", "FlagGems#3759", "mlx#3071", "onnxruntime#26390", "llama.cpp#17746",
    "vllm#53257", "JAX's published GPU softmax", "Megatron#132", "Liger#680", "Liger#1251", "tilelang#3024",
    "mlir-air#1679", "Liger#950", "pytorch#51102", "onnxruntime#29034", "LightLLM#1467", "tt-metal#53215",
    "aiter#5290", "triton#4217", "triton#10176", "tilelang#2381", "flashinfer#4724", "rocm-libraries#9055",
    "cutlass#2674", "sglang#37140", "vllm#50467", "aiter#4506", "aiter#2900", "kernels-community#680", "vllm#26092",
    "GPTQModel#2351", "Quark#30", "sparkinfer#761", "torch-xpu-ops#5001", "unsloth#10841", "sglang-jax#1598",
    "aiter#4637", "vllm#42580", "sglang#18396", "vllm-ascend#9992", "flashinfer#2889", "vllm#42034", "minimind#859",
    "TRT-LLM#16753", "FasterTransformer#672", "tt-metal#57408", "pytorch#125557", "KernelBench#165",
)  # fmt: skip
SAMPLE = pairs(127)


def test_the_tables_are_sound() -> None:
    """Names are unique, families known, descriptions one sentence, and every suspect alters something."""
    found = suspects()
    assert len({suspect.name for suspect in found}) == len(found)
    for suspect in found:
        assert suspect.family in FAMILIES, suspect.name
        assert set(suspect.specs) <= set(specs()), suspect.name
        assert suspect.specs, suspect.name
        assert not suspect.description.endswith(".")
        alterations = ("options", "inputs", "arithmetic", "definition", "results", "store", "conduct")
        assert any(getattr(suspect, name) is not None for name in alterations), suspect.name


@pytest.mark.parametrize("op", specs())
def test_every_spec_has_suspects_of_its_own(op: str) -> None:
    """At least three beside those that all kernels share."""
    shared = {suspect.name for suspect in suspects() if len(suspect.specs) > 20}
    assert len([suspect for suspect in suspects_of(op) if suspect.name not in shared]) >= 3


def test_every_reported_bug_has_a_suspect() -> None:
    """The reports that an input can reveal are origins of suspects."""
    origins = {origin.strip() for suspect in suspects() for origin in suspect.origin.split(",")}
    assert set(REPORTED) - origins == set()


@pytest.mark.parametrize("pair", pairs(67, conduct=False), ids=names)
def test_a_suspect_changes_results(pair: tuple[str, Suspect]) -> None:
    """On some drawn case its kernel gives other bits than the right one: see `changes`."""
    assert changes(*pair)


@pytest.mark.evidence
@pytest.mark.parametrize("pair", pairs(conduct=False), ids=names)
def test_every_suspect_changes_results(pair: tuple[str, Suspect]) -> None:
    """The same for all pairs of spec and suspect."""
    assert changes(*pair)


def changes(op: str, suspect: Suspect) -> bool:
    """Whether the suspect's kernel and the right one differ on a case that may be drawn, or on one of a fixed phase."""
    settings = settings_for(op, suspect)
    assert settings is not None, "no settings admit it"
    for case in drawn(op, suspect, 60):
        listed = {name: [] for name in settings["options"]}
        outputs = []
        for fault in (None, suspect):
            call = Call(kernel_of(fault, op), listed)
            outputs.append(call(case, build(case)))
        assert not isinstance(outputs[0], Finding), outputs[0]
        if isinstance(outputs[1], Finding):
            assert suspect.shows(outputs[1].kind), outputs[1]
            return True
        if not all(same_bits(a, b) for a, b in zip(*outputs, strict=True)):
            return True
    # Rare inputs (midpoints, one NaN, every number there is) belong to the fixed phases.
    return caught(op, suspect, settings, examples=40)


def caught(op: str, suspect: Suspect, settings: dict[str, Any], examples: int = 200) -> bool:
    """Whether an examination fails the suspect's kernel, by a crash only where the suspect declares one."""
    verdict = examine(kernel_of(suspect, op), op, examples=examples, shrinking=False, **settings)
    assert verdict.failure is None or suspect.shows(verdict.failure.kind), str(verdict)
    return verdict.outcome == "FAIL"


@pytest.mark.parametrize("pair", SAMPLE, ids=names)
def test_an_examination_catches_a_suspect(pair: tuple[str, Suspect]) -> None:
    """With 200 examples, as by default: a sample of all pairs."""
    op, suspect = pair
    settings = settings_for(op, suspect)
    assert settings is not None
    assert caught(op, suspect, settings), suspect.needs


@pytest.mark.evidence
@pytest.mark.parametrize("pair", pairs(), ids=names)
def test_an_examination_catches_every_suspect(pair: tuple[str, Suspect]) -> None:
    """The same for all pairs."""
    op, suspect = pair
    settings = settings_for(op, suspect)
    assert settings is not None, "no settings admit it"
    assert caught(op, suspect, settings), suspect.needs


@pytest.mark.parametrize("op", ["softmax"])
def test_the_kernel_without_a_fault_passes(op: str) -> None:
    """The float32 evaluation that suspects alter is honest by itself."""
    assert examine(kernel_of(None, op), op, examples=5, **usual(op)).passed


@pytest.mark.evidence
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", specs())
def test_every_kernel_without_a_fault_passes(op: str, dtype: str) -> None:
    """For all specs and dtypes."""
    settings: dict[str, Any] = usual(op)
    if settings["dtype"] is None and dtype != "bfloat16":
        return
    settings["dtype"] = settings["dtype"] and dtype
    verdict = examine(kernel_of(None, op), op, examples=20, **settings)
    assert verdict.passed, str(verdict)


def test_a_suspect_only_applies_where_it_says() -> None:
    """Called with options that can't show the fault, its kernel gives what the right one does."""
    suspect = next(s for s in suspects_of("attention") if s.name == "softcap_dropped")
    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(kernel_of(suspect, "attention")(q, q, q), kernel_of(None, "attention")(q, q, q))
    capped = kernel_of(suspect, "attention")(q * 9, q, q, softcap=1.0)
    assert not torch.equal(capped, kernel_of(None, "attention")(q * 9, q, q, softcap=1.0))
