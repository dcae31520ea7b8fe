"""What CUDA's libraries do to products: emulated here, explained by its switch, admitted by its contract, no other."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.formats import matrix_units
from assay.formats.accumulator import accumulator_named
from assay.formats.devices import tensor_cores_of_capability
from assay.golden import spec
from assay.interpreter import faithful, pretend_cuda
from assay.verify import Contract, Verdict, examine
from assay.verify.cases.sampler import Sampler, seeded
from assay.verify.explanation.explain import _candidates
from assay.verify.explanation.fault_models import fault_models_of
from assay.verify.explanation.fault_models.arithmetic import arithmetics_of
from assay.verify.findings import Failure
from assay.verify.harness.call import Call
from assay.verify.harness.runner import KernelHarness
from tests.zoo.attention import attention_flash
from tests.zoo.rounding import attention_rounding_scores

from .examined import fails, first, passes

FP8: dict[str, Any] = {"dtype": "float8_e4m3fn", "options": {"granularity": ["row"]}}
BF16, F16, F32 = {"dtype": "bfloat16"}, {"dtype": "float16"}, {"dtype": "float32"}
LONG = {"M": [1, 5, 9], "N": [8], "K": [16, 40, 100, 160]}


def plain(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


def split(a: Tensor, b: Tensor, parts: int = 5, *, in_dtype: bool = False) -> Tensor:
    """From 64 terms on parts of K whose sums are stored in the output's dtype, and added in float32 or ``in_dtype``."""
    if a.shape[1] < 64:
        return plain(a, b)
    length = -(-a.shape[1] // (8 * parts)) * 8
    total = torch.zeros(a.shape[0], b.shape[1])
    for left, right in zip(a.split(length, 1), b.split(length, 0), strict=True):
        total = total + plain(left, right).float()
        total = total.to(a.dtype).float() if in_dtype else total
    return total.to(a.dtype)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The product of few rows is stored before the bias is added."""
    product = x.float() @ weight.float().T
    return ((product.to(x.dtype).float() if len(x) <= 5 else product) + bias.float()).to(x.dtype)


def on_unit(name: str) -> Callable[..., Tensor]:
    """FP8 products on a tensor core, with scales by row and column."""
    unit = accumulator_named(name)

    def kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str) -> Tensor:
        operands = (matrix_units.operand(x.float().contiguous().numpy(), "float8_e4m3fn") for x in (a, b))
        with np.errstate(all="ignore"):
            zeros = np.zeros((a.shape[0], b.shape[1]), np.float32)
            sums = matrix_units.matmul(*operands, zeros, unit, promotion=unit.promotion)
        return (torch.from_numpy(sums) * scale_a * scale_b).to(torch.bfloat16)

    return kernel


def tf32(a: Tensor, b: Tensor, *, rounded: bool) -> Tensor:
    """Float32 operands whose low 13 bits are cut off or rounded."""
    half = 2**12 - 1 if rounded else 0
    x, y = (x.contiguous().view(torch.int32) for x in (a, b))
    odd = (x >> 13 & 1, y >> 13 & 1) if rounded else (0, 0)
    cut = [((bits + half + last) & -(2**13)).view(torch.float32) for bits, last in zip((x, y), odd, strict=True)]
    return torch.where(a.isfinite(), cut[0], a) @ torch.where(b.isfinite(), cut[1], b)


KERNELS: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str, str, str]] = {
    "split in bfloat16": ("gemm", split, BF16, "split_k_in_bfloat16", "allow_bf16_reduced_precision_reduction",
        "cublas-reduced"),
    "split in float16": ("gemm", split, F16, "split_k_in_float16", "allow_fp16_reduced_precision_reduction",
        "cublas-reduced"),
    "split, added in bfloat16": ("gemm", lambda a, b: split(a, b, 3, in_dtype=True), BF16, "split_k_in_bfloat16",
        "allow_bf16_reduced_precision_reduction", "cublas-reduced"),
    "split, with a bias": ("linear", split_linear, BF16, "split_k_in_bfloat16",
        "allow_bf16_reduced_precision_reduction", "cublas-reduced"),
    "FP8, fast": ("gemm_fp8", on_unit("hopper-fp8"), FP8, "summed_as_hopper_fp8", "use_fast_accum=True",
        "cublaslt-fp8-fast"),
    "FP8": ("gemm_fp8", on_unit("hopper-fp8-promoted"), FP8, "summed_as_hopper_fp8_promoted", "use_fast_accum=False",
        "cublaslt-fp8"),
    "TF32": ("gemm", lambda a, b: tf32(a, b, rounded=True), F32, "products_in_tf32_rounded", "allow_tf32",
        "triton-default"),
    "TF32, truncated": ("gemm", lambda a, b: tf32(a, b, rounded=False), F32, "products_in_tf32", "input_precision",
        "triton-default"),
}  # fmt: skip


def explained(kernel: Callable[..., Any], op: str, settings: dict[str, Any], device: str = "h100") -> Verdict:
    with faithful(device=device) if device else nullcontext():
        given: dict[str, Any] = {"effort": "quick", "examples": 4, "every_aspect": False, "shapes": LONG, **settings}
        return fails(examine(kernel, op, **given))


USUAL = ("split in bfloat16", "tail", "FP8, scale", "TF32, scale")


def of(table: dict[str, Any]) -> list[Any]:
    """The rows of a table, those that are not usual for the evidence alone."""
    return [
        pytest.param(*row, id=name, marks=() if name in USUAL else pytest.mark.evidence) for name, row in table.items()
    ]


@pytest.mark.parametrize(("op", "kernel", "settings", "name", "switch", "contract"), of(KERNELS))
def test_what_a_library_does_is_explained_and_admitted_by_name(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any], name: str, switch: str, contract: str
) -> None:
    """It fails the default, and `cublas`; the words name the switch and a contract, under which it passes."""
    verdict = explained(kernel, op, settings, device="" if op == "gemm_fp8" else "h100")
    assert verdict.explanations[0].name == name
    assert switch in str(verdict)
    assert f"contract {contract})" in verdict.explanations[0].description
    passes(first(kernel, op, contract=contract, shapes=LONG, **settings))
    fails(first(kernel, op, contract="cublas", shapes=LONG, **settings))


def without_tail(a: Tensor, b: Tensor) -> Tensor:
    """Only whole blocks of 32 along K, of longer sums."""
    whole = a.shape[1] // 32 * 32 if a.shape[1] > 64 else a.shape[1]
    return plain(a[:, :whole], b[:whole])


def scaled(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: (a.float() @ b.float() * factor).to(a.dtype)


def noisy(a: Tensor, b: Tensor) -> Tensor:
    product = a.float() @ b.float()
    return (product * (1 + 2**-8 * torch.randn(product.shape, generator=torch.Generator().manual_seed(0)))).to(a.dtype)


def scale_lost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str) -> Tensor:
    return (a.float() @ b.float() * scale_a).to(torch.bfloat16)


def fp8_tail_lost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, granularity: str) -> Tensor:
    return (without_tail(a.float(), b.float()) * scale_a * scale_b).to(torch.bfloat16)


FAULTY: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str]] = {
    "tail": ("gemm", without_tail, BF16, "cublas-reduced"),
    "tail in float16": ("gemm", without_tail, F16, "cublas-reduced"),
    "one percent": ("gemm", scaled(1.01), BF16, "cublas-reduced"),
    "noise": ("gemm", noisy, BF16, "cublas-reduced"),
    "FP8, scale": ("gemm_fp8", scale_lost, FP8, "cublaslt-fp8-fast"),
    "FP8, tail": ("gemm_fp8", fp8_tail_lost, FP8, "cublaslt-fp8"),
    "TF32, scale": ("gemm", scaled(1.01), F32, "triton-default"),
    "TF32, tail": ("gemm", without_tail, F32, "triton-default"),
}


@pytest.mark.parametrize(("op", "kernel", "settings", "contract"), of(FAULTY))
def test_another_fault_is_not_put_down_to_a_library(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any], contract: str
) -> None:
    """Neither explained so nor admitted by the contract that admits what the library does."""
    named = {explanation.name for explanation in explained(kernel, op, settings).explanations}
    assert not named & {model.name for model in arithmetics_of(spec(op))}
    fails(first(kernel, op, contract=contract, shapes=LONG, **settings))


def test_honest_products_keep_all_of_them() -> None:
    for contract in ("cublas", "cublas-reduced"):
        passes(first(plain, "gemm", contract=contract, shapes=LONG, **BF16))
    for contract in ("cublaslt-fp8", "cublaslt-fp8-fast"):
        kernel = lambda a, b, x, y, granularity: (plain(a.float(), b.float()) * x * y).bfloat16()  # noqa: E731
        passes(first(kernel, "gemm_fp8", contract=contract, shapes=LONG, **FP8))


def test_a_contract_of_fp8_says_nothing_of_other_products() -> None:
    assert first(plain, "gemm", contract="cublaslt-fp8", **BF16).outcome == "REFUSED"


def test_a_sum_in_the_inputs_dtype_is_no_wider_than_the_input() -> None:
    """The parts of a split sum are rounded to the inputs' dtype; those of FP8 products to bfloat16."""
    contract = Contract(base="cublas-reduced")
    for dtype, wire in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float8_e4m3fn", "bfloat16")):
        case = Sampler(spec("gemm"), dtype).case(seeded(1), style="small")
        assert contract.model(spec("gemm"), case.input_format).accumulate.format.name == wire


SMALL = {"B": [1], "Hkv": [2], "H": [2], "Sq": range(1, 20), "Sk": range(1, 40), "D": [16], "Dv": [16]}


def test_attention_as_cudnn_computes_it() -> None:
    """Weights may be rounded before they meet V; scores may not."""
    settings: dict[str, Any] = {**BF16, "shapes": SMALL, "contract": "cudnn-sdpa"}
    passes(first(attention_flash, "attention", **settings))
    fails(first(attention_rounding_scores, "attention", **settings))


def test_what_can_not_be_told_apart_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of at most 128 terms are the same with promotion and without: both are named, and the report says that."""
    monkeypatch.setattr("assay.verify.examination.diagnosis._SECONDS_OF_CONTRACT", 0.1)  # what they keep is not asked
    settings = {**FP8, "shapes": {"M": [3], "N": [5], "K": [24, 64]}, "examples": 0}
    verdict = explained(on_unit("hopper-fp8"), "gemm_fp8", settings)
    names = {"summed_as_hopper_fp8", "summed_as_hopper_fp8_promoted"}
    assert {explanation.name for explanation in verdict.explanations} == names
    assert "2 explanations agree with every call that was made" in str(verdict)


def test_the_device_decides_what_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the arithmetic of its own units comes first, elsewhere that of all units comes last."""
    case = Sampler(spec("gemm_fp8"), "float8_e4m3fn").case(seeded(1), style="small", options={"granularity": "row"})

    def tried(device: str = "cpu") -> list[str]:
        harness = KernelHarness(Call(on_unit("hopper-fp8"), {}), Contract(), device)
        return [model.name for model in _candidates(Failure("contract", case, ""), harness)]

    assert tried()[-1] == arithmetics_of(spec("gemm_fp8"))[-1].name
    assert "summed_as_ada_fp8" in tried()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tried("cuda")[0] == "summed_as_hopper_fp8"
    assert "summed_as_ada_fp8" not in tried("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert "summed_as_ada_fp8" in tried("cuda")[:8]
    with pretend_cuda("l40s"):
        assert tried()[0] == "summed_as_ada_fp8"


def test_the_arithmetic_of_a_device_is_no_fault_of_kernels() -> None:
    """`assay power` measures faults; an accumulator that a contract admits is none."""
    for op in ("gemm", "linear", "gemm_fp8", "moe", "attention"):
        names = {model.name for model in arithmetics_of(spec(op))}
        assert names
        assert not names & {fault.name for fault in fault_models_of(op)}
    assert arithmetics_of(spec("softmax")) == ()
    assert tensor_cores_of_capability(12, 0) is None
