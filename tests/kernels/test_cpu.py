"""The kernels for a CPU, compiled: contracts, sizes, arguments, and faults of `cpu_faults.toml`, which are found.

A usual run compiles a few kernels, and tries the others and their faults as they are written, without the compiler;
``./dev test -m evidence`` compiles all, the faulty ones too, and examines them in every dtype.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.kernels.cpu import compiling
from assay.kernels.cpu.attention import attention
from assay.kernels.cpu.attention_decode import attention_decode
from assay.kernels.cpu.cross_entropy import cross_entropy
from assay.kernels.cpu.gemm import gemm
from assay.kernels.cpu.moe import moe
from assay.kernels.cpu.norms import add_rmsnorm, layernorm, rmsnorm
from assay.kernels.cpu.rope import rope
from assay.kernels.cpu.softmax import log_softmax, softmax
from assay.kernels.cpu.swiglu import swiglu
from assay.verify.campaign.table import Entry, entries
from assay.verify.examination.procedure import examination
from assay.verify.harness.compiled import is_compiled
from tests.kernels.planting import first_failure, kernel_of, planted, public_functions

ENTRIES = {entry.name: entry for entry in entries() if entry.group == "cpu"}
FOLDER = Path(compiling.__file__).parent
ROWS, CLASSES = {"R": 30, "N": 37}, {"T": 30, "V": 70}  # with tails of vectors
DECODE = {"B": 3, "H": 4, "Hkv": 2, "D": 40, "P": 14, "page": 16, "max_pages": 4}
ATTENTION = {"B": 2, "H": 4, "Hkv": 2, "Sq": 30, "Sk": 41, "D": 8, "Dv": 12}
SIZES = {
    "cpu.softmax": ROWS,
    "cpu.log_softmax": ROWS,
    "cpu.rmsnorm": ROWS,
    "cpu.add_rmsnorm": ROWS,
    "cpu.layernorm": ROWS,
    "cpu.swiglu": ROWS,
    "cpu.swiglu (limit)": ROWS,
    "cpu.rope": {"B": 2, "S": 30, "H": 3, "D": 24},
    "cpu.cross_entropy": CLASSES,
    "cpu.cross_entropy (softcap)": CLASSES,
    "cpu.gemm": {"M": 5, "N": 130, "K": 300},
    "cpu.attention": ATTENTION,
    "cpu.attention (options)": ATTENTION,
    "cpu.attention_decode": DECODE,
    "cpu.attention_decode (8-bit cache)": DECODE,
    "cpu.moe": {"T": 20, "D": 30, "F": 40, "E": 3, "k": 2},
}
FAULTS = tomllib.loads(Path(__file__).with_name("cpu_faults.toml").read_text(encoding="utf-8"))["fault"]
PLANTED = [pytest.param(fault, id=f"{fault['entry']}: {fault['name']}") for fault in FAULTS]


@pytest.fixture
def eager() -> Iterator[None]:
    """What torch.compile would compile runs as it is written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def test_every_kernel_is_examined() -> None:
    """Each function is named by an entry of the survey's table, is known to be compiled, and has five faults."""
    public = public_functions(FOLDER)
    assert public == {entry.target for entry in ENTRIES.values()}
    assert ENTRIES.keys() == SIZES.keys()
    assert all(is_compiled(kernel_of(entry)) for name, entry in ENTRIES.items() if name != "cpu.gemm")
    planted_in = [ENTRIES[fault["entry"]].target for fault in FAULTS]
    assert {target: planted_in.count(target) for target in public if planted_in.count(target) < 5} == {}


def test_a_kernel_is_compiled_for_all_sizes() -> None:
    """Once, and anew for a few, such as those of one: of eighteen sizes less than half have code of their own."""
    counters = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    counters.clear()
    for rows, columns in ((7, 33), (2, 1000), (64, 64), (5, 2), (9, 3), (4, 4), (1, 5), (1, 1), (0, 4), (3, 1)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(log_softmax(x), torch.log_softmax(x, -1))
        torch.testing.assert_close(log_softmax(x.T), torch.log_softmax(x.T, -1))
    assert 1 <= counters["unique_graphs"] < 9


def kept(name: str) -> str:
    """What is wrong with a kernel in its first dtype and under its first options, if anything."""
    entry = ENTRIES[name]
    options = {name: values[0] for name, values in entry.settings.options.items()}
    return first_failure(kernel_of(entry), entry, SIZES[name], entry.survey_dtypes[0], options)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.usefixtures("eager")
def test_a_kernel_keeps_its_contract(name: str) -> None:
    """As it is written, in bfloat16."""
    assert kept(name) == ""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "cpu.rmsnorm" else pytest.mark.evidence) for name in SIZES]
)
def test_a_compiled_kernel_keeps_its_contract(name: str) -> None:
    """The same of what the compiler makes of it."""
    assert kept(name) == ""


def test_a_compiled_kernel_passes_an_examination() -> None:
    """At quick effort, in bfloat16: every layout, no rows and one, special values, poisoned memory."""
    settings = replace(ENTRIES["cpu.softmax"].settings, dtype="bfloat16", effort="quick")
    verdict = examination(softmax, settings)
    assert verdict.outcome == "PASS", str(verdict)


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [(entry, dtype) for entry in ENTRIES.values() for dtype in entry.dtypes],
    ids=lambda part: getattr(part, "name", part),
)
def test_kernels_at_length(entry: Entry, dtype: Any) -> None:
    """Compiled, at usual effort, in each dtype, under all options of the table."""
    verdict = examination(kernel_of(entry), replace(entry.settings, dtype=dtype))
    assert verdict.outcome == "PASS", str(verdict)


def faulty_result(fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is wrong with the kernel that has the fault, if anything."""
    entry = ENTRIES[fault["entry"]]
    first = {name: values[0] for name, values in entry.settings.options.items()}
    dtype = fault.get("dtype", "float32" if isinstance(entry.dtypes[0], str) else entry.dtypes[0])
    faulty = planted(entry, fault, monkeypatch)
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in fault.get("options", {}).items()}
    return first_failure(faulty, entry, SIZES[entry.name], dtype, {**first, **own})


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.usefixtures("eager")
def test_a_planted_fault_is_found(fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One replacement alone makes a kernel fail that passes without it."""
    assert faulty_result(fault, monkeypatch) != ""


@pytest.mark.evidence
@pytest.mark.parametrize("fault", PLANTED)
def test_a_compiled_fault_is_found(fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of what the compiler makes of it."""
    assert faulty_result(fault, monkeypatch) != ""


def ones(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.ones(shape, dtype=dtype)


def ids(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.int32)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "integers": (lambda: softmax(ones(2, 3, dtype=torch.int32)), TypeError, "x"),
    "three dimensions": (lambda: log_softmax(ones(2, 3, 4)), ValueError, "x"),
    "a longer weight": (lambda: rmsnorm(ones(2, 3), ones(4)), ValueError, "weight"),
    "a longer residual": (lambda: add_rmsnorm(ones(2, 3), ones(3, 3), ones(3)), ValueError, "residual"),
    "a longer bias": (lambda: layernorm(ones(2, 3), ones(3), ones(4)), ValueError, "bias"),
    "an odd head": (lambda: rope(ones(1, 2, 3, 5), ones(2, 2), ones(2, 2)), ValueError, "x"),
    "other positions": (lambda: rope(ones(1, 2, 3, 4), ones(3, 2), ones(2, 2)), ValueError, "cos"),
    "a limit of zero": (lambda: swiglu(ones(2, 3), ones(2, 3), limit=0.0), ValueError, "limit"),
    "no classes": (lambda: cross_entropy(ones(2, 0), ids(2).long()), ValueError, "logits"),
    "labels of 32 bits": (lambda: cross_entropy(ones(2, 3), ids(2)), TypeError, "target"),
    "another reduction": (
        lambda: cross_entropy(ones(2, 3), ids(2).long(), reduction="max"), ValueError, "reduction",
    ),
    "factors of two dtypes": (lambda: gemm(ones(2, 3), ones(3, 2, dtype=torch.bfloat16)), TypeError, "b"),
    "heads that share nothing": (
        lambda: attention(ones(1, 3, 2, 8), ones(1, 2, 2, 8), ones(1, 2, 2, 8)), ValueError, "k",
    ),
    "an unknown mask": (
        lambda: attention(ones(1, 1, 2, 8), ones(1, 1, 2, 8), ones(1, 1, 2, 8), causal="left"), ValueError, "causal",
    ),
    "a table of floats": (
        lambda: attention_decode(ones(1, 2, 8), ones(2, 4, 1, 8), ones(2, 4, 1, 8), ones(1, 2), ids(1)),
        TypeError, "block_table",
    ),
    "weights of 16 bits": (
        lambda: moe(ones(2, 4), ones(2, 6, 4), ones(2, 4, 3), ones(2, 1, dtype=torch.float16), ids(2, 1)),
        TypeError, "weights",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_named_in_errors(name: str) -> None:
    """Dtype, shape and option, before anything is compiled."""
    call, error, argument = WRONG[name]
    with pytest.raises(error, match=f"^{argument}: expected"):
        call()


@pytest.mark.skipif(torch.cuda.is_available(), reason="where a GPU is, Triton refuses tensors on a CPU by itself")
def test_a_triton_kernel_says_what_a_cpu_needs() -> None:
    """Its own words are of drivers."""
    from assay.kernels.triton.softmax import softmax

    with pytest.raises(RuntimeError, match=r"assay::softmax: expected tensors on a GPU, or a call within .*faithful"):
        softmax(torch.randn(4, 100))
