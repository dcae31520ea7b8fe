"""Bad questions give one clear error; bad kernels give a finding, and refusals that are documented are listed."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.kernels.libraries.pytorch import softmax
from assay.runtime.errors import AssayError
from assay.verify import Contract, Verdict, check, examine
from assay.verify.cases.case import Case
from assay.verify.errors import ContractError, SettingError, VerificationError
from assay.verify.examination.repro import run_line
from assay.verify.harness.refusals import refused_by_library
from assay.verify.harness.target import load_target
from assay.verify.settings import Settings

from .examined import fails, failure_of, first, quick

QUESTIONS: list[tuple[dict[str, Any], str]] = [
    ({"op": "sofmax"}, "did you mean 'softmax'"),
    ({"dtype": "bfloat17"}, "bfloat16"),
    ({"dtype": None}, "needs the dtype of x"),
    ({"dtype": {"y": "float32"}}, "no tensor 'y'"),
    ({"options": {"causal": ["none"]}}, "unknown option 'causal'"),
    ({"op": "attention", "options": {"causal": ["diagonal"]}}, "one of 'none', 'bottom_right', 'top_left'"),
    ({"op": "attention", "options": {"causal": "none"}}, "a list of the values to vary over"),
    ({"op": "attention", "options": {"window": [3]}}, "(left, right)"),
    ({"shapes": {"Q": [3]}}, "unknown dimension 'Q'"),
    ({"shapes": {"N": [-3]}}, "whole numbers"),
    ({"op": "gemm_int4", "shapes": {"K": [33]}}, "needs a multiple of"),
    ({"layouts": ["sideways"]}, "unknown layout 'sideways'"),
    ({"framework": "tensorflow"}, "expected one of 'torch', 'numpy'"),
    ({"device": "tpu:7"}, "device='tpu:7' can't be used"),
    ({"examples": -1}, "examples=-1"),
    ({"contract": Contract(stages={"weights": "input"})}, "unknown stage 'weights'"),
]


@pytest.mark.parametrize(("question", "words"), QUESTIONS, ids=[str(question)[:40] for question, _ in QUESTIONS])
def test_a_question_that_cannot_be_asked_is_one_clear_line(question: dict[str, Any], words: str) -> None:
    settings = {"op": "softmax", "dtype": "float32", **question}
    with pytest.raises(AssayError) as caught:
        examine(softmax, settings.pop("op"), **settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"accumulate": "float31"}, "did you mean 'float32'"),
        ({"accumulate": "hoper-fp8"}, "did you mean 'hopper-fp8'"),
        ({"compute": "float12"}, "unknown format 'float12'"),
        ({"rounding": "up"}, "'nearest', 'nearest_away', 'toward_zero', 'stochastic'"),
        ({"overflow": "wrap"}, "'inf', 'saturate', 'nan'"),
        ({"subnormals": True}, "'keep', 'flush'"),
        ({"ulps": {"exp": -1}}, "at least 0"),
        ({"stages": {"probabilities": "bf17"}}, "unknown format"),
    ],
)
def test_a_contract_that_cannot_be_is_one_clear_line(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(AssayError, match="contract: ") as caught:
        Contract(**fields)
    assert words in str(caught.value)


def test_a_kernel_that_cannot_be_called_is_refused() -> None:
    """And so is an accumulator model that doesn't take the inputs' format: it says nothing about them."""
    with pytest.raises(AssayError, match="expected a callable, got str"):
        examine("softmax", "softmax", dtype="float32")
    verdict = quick(softmax, contract=Contract(accumulate="hopper-fp8"))
    assert verdict.outcome == "REFUSED"
    assert "float8_e4m3fn" in verdict.note


def crash(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image\nfor this device")


def leave(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def hang(x: torch.Tensor) -> torch.Tensor:
    while True:
        pass


def sleep(x: torch.Tensor) -> torch.Tensor:
    time.sleep(10**6)
    return x


CONDUCT = [
    (crash, "crash", "RuntimeError: no kernel image"),
    (leave, "crash", "SystemExit: 3"),
    (hang, "timeout", "no result within 0.3 s"),
    (sleep, "timeout", "no result within 0.3 s"),
    (lambda x: x.sum(-1), "shape", "expected shape"),
    (lambda x: (x, x), "shape", "expected 1 result(s)"),
    (lambda x: torch.softmax(x.double(), -1), "dtype", "expected float32, got float64"),
    (lambda x: None, "dtype", "got NoneType"),
    (lambda x: torch.softmax(x, -1).to("meta"), "dtype", "device"),
    (lambda x: x.copy_(torch.softmax(x, -1)), "input_mutated", "changed its input x"),
]


@pytest.mark.parametrize(
    ("kernel", "kind", "words"), CONDUCT, ids=[f"{kind}-{words[:20]}" for _, kind, words in CONDUCT]
)
def test_misconduct_is_a_finding(kernel: Any, kind: str, words: str) -> None:
    verdict = fails(quick(kernel, timeout=0.3))
    assert verdict.failure.kind == kind
    assert words in verdict.failure.message


def test_check_raises_the_report() -> None:
    """`check` raises an AssertionError whose message is the report, and returns the verdict of a pass."""
    with pytest.raises(AssertionError) as caught:
        check(crash, "softmax", dtype="float32", effort="quick", examples=3)
    assert isinstance(caught.value, VerificationError)
    assert "FAIL  crash as softmax" in str(caught.value)
    assert check(softmax, "softmax", dtype="float32", effort="quick", examples=3).passed


def test_no_case_is_never_a_pass() -> None:
    verdict = quick(softmax, dtype="bfloat16", contract=Contract(accumulate="float8_e5m2"), examples=3)
    assert verdict.outcome == "VACUOUS"


def test_almost_only_zeros_is_mistrusted() -> None:
    verdict = quick(
        lambda q, k, v, causal: torch.zeros_like(q),
        "attention",
        options={"causal": ["bottom_right"]},
        shapes={"B": [1], "Sq": [64], "Sk": [1], "D": [8], "Dv": [8], "Hkv": [1], "H": [1]},
    )
    assert verdict.outcome in ("MISTRUSTED", "FAIL")


@pytest.mark.parametrize(
    "line",
    ["", "assay repro", "{}", '{"spec":"softmax"}', "assay repro 'not json'", '{"target":"","out":[],"case":{}}'],
)
def test_a_repro_line_that_does_not_parse_is_one_clear_line(line: str) -> None:
    with pytest.raises(AssayError, match="repro line: ") as caught:
        run_line(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", ["softmax", "no.such.module:f", "torch:no_such_function", "torch:float32"])
def test_a_target_that_cannot_be_loaded_is_one_clear_line(target: str) -> None:
    with pytest.raises(AssayError, match="target "):
        load_target(target)


def test_a_case_survives_its_line() -> None:
    verdict = quick(crash, examples=3)
    assert Case.from_dict(verdict.failure.case.as_dict()) == verdict.failure.case


def test_a_mistaken_name_is_told_the_right_one() -> None:
    """`Contract` and `examine` say which field or setting comes nearest to one that they don't have."""
    with pytest.raises(ContractError, match="contract: unknown field 'acumulate'; did you mean 'accumulate'"):
        Contract(acumulate="float16")
    with pytest.raises(ContractError, match="did you mean 'subnormals'"):
        replace(Contract(), subnormal="flush")
    with pytest.raises(SettingError, match="examine: unknown setting 'exampels'; did you mean 'examples'"):
        examine(torch.softmax, "softmax", exampels=3)


WIDE = {"too wide": "N * itemsize > 256"}


def narrow(x: Tensor) -> Tensor:
    if x.shape[1] * x.element_size() > 256:
        raise RuntimeError(f"rows of {x.shape[1]} are too wide")
    return torch.softmax(x.float(), -1).to(x.dtype)


def nowhere(x: Tensor) -> Tensor:
    raise NotImplementedError("too wide")


def by_accident(x: Tensor) -> Tensor:
    """A crash that has the words of a refusal, where none is documented."""
    if x.shape[0] > 1:
        raise ValueError("too wide")
    return narrow(x)


def verdict_of(kernel: Any, **settings: Any) -> Verdict:
    return quick(kernel, **{"examples": 4, "shapes": {"N": range(1, 260)}, **settings})


@pytest.mark.parametrize("isolate", [False, True])
def test_a_documented_refusal_is_listed(isolate: bool) -> None:
    verdict = verdict_of(narrow, refuses=WIDE, isolate=isolate)
    assert verdict.outcome == "PASS", str(verdict)
    assert list(verdict.refused) == ["RuntimeError 'too wide' where N * itemsize > 256"]
    assert sum(verdict.refused.values()) > 1
    assert "refused" in str(verdict)
    assert Verdict.from_dict(verdict.as_dict()).refused == verdict.refused
    if not isolate:
        assert verdict_of(narrow).outcome == "FAIL"


def test_only_what_is_documented_is_a_refusal() -> None:
    for kernel, refuses in ((by_accident, WIDE), (narrow, {"too narrow": ""}), (narrow, {"too wide": "N > 200"})):
        verdict = verdict_of(kernel, refuses=refuses)
        assert verdict.failure.kind == "crash"


def test_who_refuses_everything_does_not_pass() -> None:
    assert verdict_of(nowhere, refuses=["too wide"]).outcome == "VACUOUS"
    mostly = verdict_of(narrow, refuses="too wide", shapes={"N": range(60, 260)})
    assert mostly.outcome == "MISTRUSTED"
    assert "cases were refused" in mostly.note


def dispatched(x: Tensor) -> Tensor:
    """Softmax; rows of more than 128 numbers PyTorch's dispatcher of SDPA refuses."""
    if x.shape[1] > 128:
        q, mask = torch.zeros(1, 1, 4, 8), torch.zeros(4, 4, requires_grad=True)
        with torch.enable_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return torch.softmax(x.float(), -1).to(x.dtype)


def pretender(x: Tensor) -> Tensor:
    """A kernel that raises in a library's words."""
    if x.shape[1] > 128:
        raise RuntimeError("No available kernel. Aborting execution.")
    return torch.softmax(x.float(), -1).to(x.dtype)


def test_a_librarys_refusal_is_listed_and_a_kernel_cannot_pretend_one() -> None:
    sizes = {"N": [*range(1, 130), 200]}
    verdict = verdict_of(dispatched, shapes=sizes)
    assert verdict.outcome == "PASS", str(verdict)
    assert [words.partition(":")[0] for words in verdict.refused] == ["torch refuses it"]
    assert verdict_of(pretender, shapes=sizes).failure.kind == "crash"


@pytest.mark.parametrize(
    ("library", "message"),
    [
        ("torch", "No available kernel. Aborting execution."),
        ("torch", "key is not correctly aligned (strideM)"),
        ("torch", "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"),
        ("torch", "self.size(0) needs to be greater than 16, but got 3"),
        ("torch", "self.size(1) needs to be greater than 0 and a multiple of 8, but got 7"),
        ("torch", "mat2 shape (40x7 must be divisible by 16"),
        ("torch", "FlashAttention only support fp16 and bf16 data type"),
        ("torch", "FlashAttention forward only supports head dimension at most 256"),
        ("triton", "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes"),
        (
            "triton",
            "PTXAS error: `ptxas` stderr:\nptxas error : Function 'k' uses too much shared data (0x14000 bytes",
        ),
        ("triton", "PTXAS error: ptxas fatal : (C7600) Register allocation failed with register count of '64'."),
        ("assay", "gemm_fp8: this Pallas kernel has no grid for GPUs; lower it for a TPU or a CPU"),
    ],
)
def test_the_words_of_libraries_are_known_where_their_code_raises_them(library: str, message: str) -> None:
    """The first are from a run on an H100. What the library's code raises is a refusal, the same elsewhere is none."""
    for module, expected in ((f"{library}.inside", True), (f"{library}ish", False)):
        code = compile(f"raise RuntimeError({message!r})", module, "exec")
        with pytest.raises(RuntimeError) as caught:
            exec(code, {"__name__": module})
        assert bool(refused_by_library(caught.value)) is expected


@pytest.mark.parametrize(
    ("refuses", "words"),
    [
        ({"too wide": "M > 3"}, "unknown dimension 'M'"),
        ({"too wide": "N >"}, "expected a condition on sizes"),
        ({"too wide": "N.real > 3"}, "expected comparisons of sizes"),
        ({"too (wide": ""}, "expected a regular expression"),
    ],
)
def test_a_refusal_that_cannot_be_is_one_clear_line(refuses: dict[str, str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Settings("softmax", dtype="float32", refuses=refuses)


def test_refusals_are_settings() -> None:
    settings = Settings("softmax", dtype="float32", refuses=["too wide"])
    assert settings.refuses == {"too wide": ""}
    assert Settings.from_table(settings.as_table()) == settings


def rms(x: Tensor, w: Tensor) -> Tensor:
    """An adapter that lacks a listed keyword."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def test_a_wrong_signature_is_told_with_the_call() -> None:
    with pytest.raises(SettingError, match=r"called as f\(x, weight, eps=1e-06\), but it takes \(x: .*'eps'"):
        examine(rms, "rmsnorm", dtype="float32", options={"eps": [1e-6]})
    with pytest.raises(SettingError, match=r"called as f\(x\), but it takes \(x: .*missing a required argument: 'w'"):
        examine(rms, "softmax", dtype="float32")


def test_a_type_error_inside_names_the_call_too() -> None:
    """An adapter that takes anything hands on what the kernel doesn't take."""
    failure = failure_of(
        first(lambda *tensors, **options: rms(*tensors, **options), "rmsnorm", options={"eps": [1e-6]})
    )
    assert "the kernel is called as f(x, weight, eps=1e-06)" in failure.message
