"""Autotuned kernels on a device: assigned configurations, and programs compiled beforehand.

No GPU is needed: the interpreter takes its place, and Triton compiles for an emulated one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from assay.formats.devices import CudaProperties, cuda_device_named
from assay.interpreter import Assignment, Choice, assigned, pretend_cuda
from assay.interpreter.replacing import replaced
from assay.runtime.tensors import pack, unpack
from assay.verify import Verdict, examine
from assay.verify.cases.case import Case
from assay.verify.examination import run
from assay.verify.examination.plan import Plan, make_plan
from assay.verify.examination.repro import run_line
from assay.verify.harness import runner
from assay.verify.harness.compilation import Compiled, Program, as_plain, compile_one, compiled, missing, unpacked
from assay.verify.harness.compilers import suspected_faults
from assay.verify.reference import spec_name_of
from assay.verify.settings import Settings

HOOKED: list[int] = []
CONFIGS = [
    triton.Config({"BLOCK": block}, num_warps=warps, pre_hook=lambda arguments: HOOKED.append(arguments["BLOCK"]))
    for block, warps in ((64, 1), (128, 2), (256, 4))
]
WORDS = ["BLOCK=64, num_warps=1, num_stages=3", "BLOCK=128, num_warps=2, num_stages=3"]
WORDS += ["BLOCK=256, num_warps=4, num_stages=3"]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def _relu_kernel(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if BLOCK == 256:
        x *= factor
    tl.store(y_ptr + i, tl.where(x > 0, x, x * 0), mask=i < n)


@triton.autotune(configs=[triton.Config({"BLOCK": 1024}), triton.Config({"BLOCK": 1 << 16}, num_warps=32)], key=["n"])
@triton.jit
def _greedy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """A gather, which takes 4 bytes of shared memory for each element: 256 KiB in the second configuration."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.gather(tl.load(x_ptr + i, mask=i < n, other=0.0), tl.arange(0, BLOCK), 0)
    tl.store(y_ptr + i, tl.where(x > 0, x, x * 0), mask=i < n)


@triton.jit
def _dots_kernel(x_ptr, y_ptr, SECOND: tl.constexpr):
    i = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    x = tl.load(x_ptr + i)
    y = tl.dot(x, x)
    if SECOND:
        y = tl.dot(x, y.to(tl.bfloat16))
    tl.store(y_ptr + i, y)


def _launched(kernel: Any, x: torch.Tensor, *arguments: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel(), *arguments)
    return y


def right(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0)."""
    return _launched(_relu_kernel, x, 1.0)


def wrong_in_one(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0), in one configuration 1.5 times that."""
    return _launched(_relu_kernel, x, 1.5)


def greedy(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0), in one configuration with more shared memory than a block has."""
    return _launched(_greedy_kernel, x)


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return max(x, 0) by PyTorch."""
    return torch.where(x > 0, x, x * 0)


def examined(kernel: Any, monkeypatch: pytest.MonkeyPatch, *, compiling: bool = False, **settings: Any) -> Verdict:
    """Examine a kernel as a relu, quickly, with its configurations assigned as on a device."""
    monkeypatch.setattr(runner, "Assignment", lambda **_: Assignment(on_device=True))
    if not compiling:
        monkeypatch.setattr(run, "compiled", lambda harness, cases: Compiled())
    return examine(kernel, relu, tensors="x[R,N] -> y[R,N]", dtype="float32", effort="quick", **settings)


@cache
def faulty() -> Verdict:
    """Return the verdict of a kernel that is wrong in one configuration."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return examined(wrong_in_one, monkeypatch, every_aspect=False, layouts=["contiguous"])


def plan_of(kernel: Any) -> Plan:
    """Return the plan of a kernel's examination."""
    settings = Settings(spec_name_of(relu, "x[R,N] -> y[R,N]"), dtype="float32", effort="quick")
    return make_plan(kernel, settings)


def of_columns(plan: Plan, *columns: int) -> list[Case]:
    """Return cases of one row."""
    case = plan.sampler.case(lambda values: values[0], style="small")
    return [Case(case.spec, {"R": 1, "N": size}, case.dtypes) for size in columns]


def test_a_failure_names_its_configuration_and_its_line_pins_it(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = faulty()
    assert verdict.outcome == "FAIL"
    assert verdict.failure is not None
    assert verdict.failure.case.configs == {"_relu_kernel": (WORDS[2],)}
    assert "_relu_kernel with BLOCK=256" in " ".join(str(verdict).split())
    assert f'"configs":{{"_relu_kernel":["{WORDS[2]}"]}}' in verdict.repro
    assert Verdict.from_dict(verdict.as_dict()) == verdict
    for words in WORDS:
        result = run_line(verdict.repro.replace(WORDS[2], words))
        assert (result.failure is not None) == (words == WORDS[2])


def test_the_page_names_the_configuration(tmp_path: Path) -> None:
    assert "autotuned: <code>_relu_kernel with BLOCK=256" in faulty().to_html(tmp_path / "verdict.html").read_text()


def test_every_configuration_is_examined_and_the_tuner_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    HOOKED.clear()
    assert examined(right, monkeypatch, layouts=["contiguous"]).passed
    assert set(HOOKED) == {64, 128, 256}
    assert _relu_kernel.cache == {}
    assert "best_config" not in vars(_relu_kernel)


def test_a_cpu_s_verdict_has_no_configurations() -> None:
    asked: dict[str, Any] = {"dtype": "float32", "effort": "quick", "shrinking": False, "every_aspect": False}
    verdict = examine(wrong_in_one, relu, tensors="x[R,N] -> y[R,N]", **asked)
    assert verdict.failure is not None
    assert verdict.failure.case.configs == {}


def test_a_configuration_that_a_device_refuses_gives_way_to_the_next() -> None:
    ran, x = [], torch.ones(3)

    def launch(kernel: Any, *arguments: Any, **keywords: Any) -> None:
        if keywords["BLOCK"] == 256:
            raise OutOfResources(1 << 18, 1 << 17, "shared memory")
        ran.append(keywords["BLOCK"])

    assignment = Assignment(on_device=True)
    for _ in range(2):
        assignment.begin({"_relu_kernel": (WORDS[2],)})
        with replaced([(JITFunction, "run", launch)]), assigned(assignment):
            right(x)
    assert ran == [64, 64]
    assert assignment.used == {"_relu_kernel": (WORDS[0],)}
    assert list(assignment.refusals) == [f"_relu_kernel, {WORDS[2]}"]
    with replaced([(JITFunction, "run", launch)]), assigned(assignment), pytest.raises(OutOfResources):
        triton.autotune(configs=CONFIGS[2:], key=[])(_relu_kernel.fn)[(1,)](x, x, 3, 1.0)


def test_programs_are_compiled_once_before_the_first_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = plan_of(right)
    cases = of_columns(plan, 3, 5, 48, 64)
    first, again = (compiled(plan.harness, cases) for _ in range(2))
    assert first.programs == again.programs == len(list(tmp_path.glob("*/_relu_kernel.cubin")))
    assert 3 <= first.programs <= 4 + len(first.pinned)
    assert first.refused == {}
    ((kernel, (words,)),) = first.named(cases[2], cases).configs.items()
    assert kernel == "_relu_kernel"
    assert words in WORDS
    pinned = replace(cases[2], configs={kernel: ("BLOCK=1",)})
    assert first.named(pinned, cases).configs == pinned.configs
    assert unpacked(unpack(pack(as_plain(first)))) == first


def test_the_emulated_device_has_the_properties_of_the_real_one() -> None:
    h100 = cuda_device_named("h100")
    assert CudaProperties.of(h100) == replace(h100, key=h100.name.lower())
    with pretend_cuda(replace(h100, multi_processor_count=7)):
        assert torch.cuda.get_device_properties(0).multi_processor_count == 7


def test_what_launches_nothing_compiles_nothing() -> None:
    plan = plan_of(relu)
    assert compiled(plan.harness, of_columns(plan, 3)) == Compiled()


def test_what_no_case_has_is_pinned() -> None:
    choice, cases = Choice("k", "a", ("a", "b")), of_columns(plan_of(right), 3, 5, 4)
    assert missing({0: [choice], 1: [choice], 2: []}, cases, Assignment()) == {1: {"k": ("b",)}}
    assert missing({0: [choice], 1: [Choice("k", "b", ("a", "b"))]}, cases, Assignment()) == {}


def test_a_program_with_several_dots_is_one_that_its_compiler_s_faults_may_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretend_cuda("h100"):
        x, y = (torch.empty(64, 64, dtype=dtype, device="cuda") for dtype in (torch.bfloat16, torch.float32))
        made = [compile_one(Program(_dots_kernel, (x, y), {"SECOND": second}, None)) for second in (False, True)]
    assert made == [("", {"wgmma.commit_group": 1}), ("", {"wgmma.commit_group": 2})]
    assert suspected_faults("ptxas", "12.8.93", made[0][1]) == []
    assert suspected_faults("ptxas", "13.3", made[1][1]) == []
    (words,) = suspected_faults("ptxas", "12.8.93", made[1][1])
    assert words.startswith(
        "perhaps the compiler's fault, not the kernel's: ptxas 12.8.93, which made its machine code"
    )
    assert "triton-lang/triton#10486, " in words
    assert "To know, set TRITON_PTXAS_PATH to a ptxas of 13.3 or later, and examine again" in words


def test_a_refused_configuration_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    few: dict[str, Any] = {"shapes": {"R": [1, 3], "N": [5, 64]}, "layouts": ["contiguous"]}
    verdict = examined(greedy, monkeypatch, compiling=True, **few)
    assert verdict.passed
    assert verdict.compiled > 0
    ((config, message),) = verdict.refused_configs.items()
    assert config == "_greedy_kernel, BLOCK=65536, num_warps=32, num_stages=3"
    assert message.startswith("OutOfResources: out of resource: shared memory, Required: 262144")
    assert f"  refused     {config}: OutOfResources" in str(verdict)
