"""The bundled kernels in CUDA C++: compiled for three GPUs, run on the CPU from the same source, faults planted."""

import importlib
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.bench.inspection.facts import resources
from assay.kernels.cuda import compiler
from assay.kernels.cuda.attention_decode import attention_decode
from assay.kernels.cuda.gemm_int4 import gemm_int4
from assay.kernels.cuda.rmsnorm import rmsnorm
from assay.verify.campaign.table import Entry, entries
from assay.verify.examination.procedure import examination

ENTRIES = {entry.name: entry for entry in entries() if entry.group == "cuda"}
FAULTS = tomllib.loads(Path(__file__).with_name("cuda_faults.toml").read_text())["fault"]
FIRST = {fault["entry"]: fault for fault in reversed(FAULTS)}
PLANTED = [
    pytest.param(fault, id=f"{fault['entry']}: {fault['name']}", marks=() if early else pytest.mark.evidence)
    for fault in FAULTS
    for early in [FIRST[fault["entry"]] is fault]
]
SOURCES = Path(compiler.__file__).with_name("sources")
BUILDS = {
    "rmsnorm": {"ELEMENT": "bfloat16", "WEIGHT": "float32"},
    "attention_decode": {"ELEMENT": "bfloat16", "CACHE": "float8_e4m3fn", "GROUP": "8", "VECTOR": "8"},
    "merge": {"ELEMENT": "float16"},
    "gemm_int4": {"ELEMENT": "float16", "ROWS": "8", "PACKING": "2"},
    "sum": {"ELEMENT": "bfloat16"},
}


def kernel_of(entry: Entry) -> Any:
    """The function that an entry names."""
    module, _, name = entry.target.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100"])
def test_every_source_compiles_without_a_spill(arch: str) -> None:
    """By NVRTC, in its largest form: nothing of a thread lies in local memory."""
    assert set(BUILDS) == {path.stem for path in SOURCES.glob("*.cu")}
    for name, defines in BUILDS.items():
        registers, stack = resources(compiler.compiled(name, arch, tuple(defines.items())).code)
        assert 0 < registers <= 255
        assert stack == 0, f"{name} keeps {stack} bytes of a thread in local memory"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "dtype", "examples"),
    [
        *(
            pytest.param(entry, dtype, 0, id=f"{name} {dtype}")
            for name, entry in ENTRIES.items()
            for dtype in entry.survey_dtypes
        ),
        *(
            pytest.param(entry, dtype, None, id=f"{name} {dtype} fuzzed", marks=pytest.mark.evidence)
            for name, entry in ENTRIES.items()
            for dtype in entry.dtypes
        ),
    ],
)
def test_a_kernel_keeps_its_contract(entry: Entry, dtype: Any, examples: int | None) -> None:
    """At quick effort; a usual run takes the dtypes that a survey takes, and no fuzzed cases."""
    settings = replace(entry.settings, dtype=dtype, effort="quick", examples=examples)
    verdict = examination(kernel_of(entry), settings)
    assert verdict.outcome == "PASS", str(verdict)


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces a line of a source, in a copy of all of them."""

    def plant(source: str, old: str, new: str) -> None:
        folder = shutil.copytree(SOURCES, tmp_path / "sources")
        path = next(folder.glob(f"{source}.cu*"))
        text = path.read_text()
        assert old in text, f"{path.name} has no {old!r}: the fault can't be planted"
        path.write_text(text.replace(old, new))
        monkeypatch.setattr(compiler, "_SOURCES", folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        compiler._on_host.cache_clear()

    yield plant
    compiler._on_host.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: dict[str, str], planted: Any) -> None:
    """Under the contract that the right source keeps; a usual run of the tests plants the first of each entry."""
    planted(fault["source"], fault["old"], fault["new"])
    entry = ENTRIES[fault["entry"]]
    dtype = entry.survey_dtypes[0]
    settings = replace(
        entry.settings,
        dtype=dtype,
        effort=fault.get("effort", "quick"),
        every_aspect=False,
        shrinking=False,
        strict=True,
    )
    verdict = examination(kernel_of(entry), settings)
    assert verdict.outcome == "FAIL", str(verdict)


def test_five_faults_are_planted_in_each_kernel() -> None:
    """In what a wrapper launches, all of its sources taken together."""
    for function in ("rmsnorm", "attention_decode", "gemm_int4"):
        assert sum(fault["entry"].startswith(f"cuda.{function}") for fault in FAULTS) >= 5


def test_a_barrier_that_not_all_threads_reach_is_an_error(planted: Any) -> None:
    """A GPU hangs there; on the CPU the launch says so."""
    planted("rmsnorm", "    __syncthreads();\n", "    if (threadIdx.x) __syncthreads();\n")
    with pytest.raises(RuntimeError, match=r"rmsnorm\.cu: expected every thread of a block at its barriers"):
        rmsnorm(torch.ones(2, 600), torch.ones(600))


def test_a_source_that_does_not_compile_is_named(planted: Any) -> None:
    """With what the compiler says."""
    planted("rmsnorm", "float squares = 0;", "float squares = none;")
    with pytest.raises(RuntimeError, match=r"(?s)rmsnorm\.cu: .* failed:.*none"):
        rmsnorm(torch.ones(2, 3), torch.ones(3))


def test_arguments_are_named_in_errors() -> None:
    """Dtype, shape, and how many rows an int4 product takes."""
    with pytest.raises(TypeError, match="weight: expected float32 or bfloat16 or float16, got int64"):
        rmsnorm(torch.ones(2, 3), torch.ones(3, dtype=torch.int64))
    cache, lengths = torch.ones(1, 4, 2, 8), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="k_cache: expected a number of heads that divides q's 3, got 2"):
        attention_decode(torch.ones(1, 3, 8), cache, cache, torch.zeros(1, 1, dtype=torch.int32), lengths)
    codes = torch.zeros(4, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="x: expected at most 8 rows, got M=9"):
        gemm_int4(torch.ones(9, 8), codes, torch.ones(1, 8), codes[:1])


def test_the_kernels_are_operators() -> None:
    """Schema, fake implementation and compilation agree with each, and no gradient is left out in silence."""
    x, weight = torch.randn(3, 64, requires_grad=True), torch.randn(64)
    codes, scales = torch.randint(0, 256, (32, 16), dtype=torch.uint8), torch.rand(2, 16)
    zeros = torch.zeros(2, 16, dtype=torch.uint8)
    cache = torch.randn(2, 4, 1, 64)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    calls = {
        "rmsnorm": (x.detach(), weight, 1e-6, 0.0),
        "gemm_int4": (x.detach(), codes, scales, zeros, "plain"),
        "attention_decode": (torch.randn(1, 2, 64), cache, cache.clone(), table, lengths, 0.125, 1.0, 1.0),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.assay, f"cuda_{name}").default, arguments)
    with pytest.raises(NotImplementedError, match="assay::cuda_rmsnorm has no gradient"):
        rmsnorm(x, weight).sum().backward()
