"""Fault models: each is a fault indeed, every reported bug has one, and an examination catches them."""

from typing import Any

import pytest
import torch

from assay.golden import Fault, Spec, spec, specs
from assay.runtime.tensors import same_numbers
from assay.verify import examine
from assay.verify.cases.case import build
from assay.verify.explanation.fault_models import fault_models, fault_models_of
from assay.verify.explanation.fault_models.evaluation import kernel_of
from assay.verify.explanation.fault_models.fault_model import FAMILIES, FaultModel
from assay.verify.findings import Failure
from assay.verify.harness.call import Call

from .fault_cases import drawn, names, pairs, settings_for

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
SAMPLE = pairs(251)


def every_fault_model() -> tuple[FaultModel, ...]:
    """Those of the tables, and those that stand in the files of ops."""
    own = (fault for op in map(spec, specs()) for fault in fault_models_of(op.name) if fault.name in owned(op))
    return (*fault_models(), *own)


def owned(op: Spec) -> set[str]:
    """The names of the faults of an op's own file."""
    return {fault.name for fault in op.faults if isinstance(fault, Fault)}


def test_the_tables_are_sound() -> None:
    """Names are unique, families known, descriptions one sentence, and every fault model alters something."""
    found = every_fault_model()
    assert len({fault.name for fault in found}) == len(found)
    for fault in found:
        assert fault.family in FAMILIES, fault.name
        assert callable(fault.specs) or set(fault.specs) <= set(specs()), fault.name
        assert any(fault.is_of(spec(op)) for op in specs()), fault.name
        assert not fault.description.endswith(".")
        alterations = ("options", "inputs", "arithmetic", "definition", "results", "store", "side_effects")
        assert any(getattr(fault, name) is not None for name in alterations), fault.name


@pytest.mark.parametrize("op", [spec(name) for name in specs()], ids=lambda op: op.name)
def test_a_spec_names_fault_models_that_there_are(op: Spec) -> None:
    """What it says of fault models of any op are their names, and not both that it has one and that it hasn't."""
    general = {fault.name for fault in fault_models() if callable(fault.specs) or not fault.specs}
    named = {fault for fault in op.faults if isinstance(fault, str)}
    assert {*named, *op.exempt} <= general
    assert not named & {*op.exempt}


@pytest.mark.parametrize("op", specs())
def test_every_spec_has_fault_models_of_its_own(op: str) -> None:
    """At least three beside those that all kernels share."""
    shared = {fault.name for fault in fault_models() if sum(map(fault.is_of, map(spec, specs()))) > 20}
    assert len([fault for fault in fault_models_of(op) if fault.name not in shared]) >= 3


def test_every_reported_bug_has_a_fault_model() -> None:
    """The reports that an input can reveal are origins of fault models."""
    origins = {origin.strip() for fault in every_fault_model() for origin in fault.origin.split(",")}
    assert set(REPORTED) - origins == set()


@pytest.mark.parametrize("pair", pairs(199, side_effects=False), ids=names)
def test_a_fault_model_changes_results(pair: tuple[str, FaultModel]) -> None:
    """On some drawn case its kernel gives other bits than the right one: see `changes`."""
    assert changes(*pair)


@pytest.mark.evidence
@pytest.mark.parametrize("pair", pairs(side_effects=False), ids=names)
def test_every_fault_model_changes_results(pair: tuple[str, FaultModel]) -> None:
    """The same for all pairs of spec and fault model."""
    assert changes(*pair)


def changes(op: str, fault: FaultModel) -> bool:
    """Whether the fault's kernel and the right one differ on a case that may be drawn, or on one of a fixed phase."""
    settings = settings_for(op, fault)
    assert settings is not None, "no settings admit it"
    for case in drawn(op, fault, 60):
        listed = {name: [] for name in settings["options"]}
        outputs = []
        for present in (None, fault):
            call = Call(kernel_of(present, op), listed)
            outputs.append(call(case, build(case)))
        assert not isinstance(outputs[0], Failure), outputs[0]
        if isinstance(outputs[1], Failure):
            assert fault.shows(outputs[1].kind), outputs[1]
            return True
        if not all(same_numbers(a, b) for a, b in zip(*outputs, strict=True)):
            return True
    # Rare inputs (midpoints, one NaN, every number there is) belong to the fixed phases.
    return caught(op, fault, settings, examples=40)


def caught(op: str, fault: FaultModel, settings: dict[str, Any], examples: int = 200) -> bool:
    """Whether an examination fails the fault model's kernel, by a crash only where the fault model declares one."""
    first = {"shrinking": False, "strict": True, "every_aspect": False}
    verdict = examine(kernel_of(fault, op), op, examples=examples, **first, **settings)
    assert verdict.failure is None or fault.shows(verdict.failure.kind), str(verdict)
    return verdict.outcome == "FAIL"


@pytest.mark.parametrize("pair", SAMPLE, ids=names)
def test_an_examination_catches_a_fault_model(pair: tuple[str, FaultModel]) -> None:
    """With 200 examples, as by default: a sample of all pairs."""
    op, fault = pair
    settings = settings_for(op, fault)
    assert settings is not None
    assert caught(op, fault, settings), fault.needs


@pytest.mark.evidence
@pytest.mark.parametrize("pair", pairs(), ids=names)
def test_an_examination_catches_every_fault_model(pair: tuple[str, FaultModel]) -> None:
    """The same for all pairs."""
    op, fault = pair
    settings = settings_for(op, fault)
    assert settings is not None, "no settings admit it"
    assert caught(op, fault, settings), fault.needs


@pytest.mark.parametrize("op", ["softmax"])
def test_the_kernel_without_a_fault_passes(op: str) -> None:
    """The float32 evaluation that fault models alter is honest by itself."""
    assert examine(kernel_of(None, op), op, examples=5, **spec(op).default_settings).passed


@pytest.mark.evidence
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", specs())
def test_every_kernel_without_a_fault_passes(op: str, dtype: str) -> None:
    """For all specs and dtypes."""
    settings: dict[str, Any] = spec(op).default_settings
    if settings["dtype"] is None and dtype != "bfloat16":
        return
    settings["dtype"] = settings["dtype"] and dtype
    verdict = examine(kernel_of(None, op), op, examples=20, **settings)
    assert verdict.passed, str(verdict)


def test_a_fault_model_only_applies_where_it_says() -> None:
    """Called with options that can't show the fault, its kernel gives what the right one does."""
    fault = next(s for s in fault_models_of("attention") if s.name == "softcap_dropped")
    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(kernel_of(fault, "attention")(q, q, q), kernel_of(None, "attention")(q, q, q))
    capped = kernel_of(fault, "attention")(q * 9, q, q, softcap=1.0)
    assert not torch.equal(capped, kernel_of(None, "attention")(q * 9, q, q, softcap=1.0))
