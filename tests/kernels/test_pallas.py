"""The Pallas kernels, interpreted on a CPU: arguments, contracts, and copies with one fault each that are found."""

import importlib
import math
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.golden.registry import spec
from assay.verify.campaign.survey import examine_job, plan
from assay.verify.campaign.table import Entry, entries
from assay.verify.cases.case import Case
from assay.verify.contract import contract_from_table
from assay.verify.execution.call import Call
from assay.verify.execution.runner import Bench
from assay.verify.named_contracts import contract_named

pytest.importorskip("jax")

import jax.numpy as jnp

from assay.kernels.pallas.attention import attention
from assay.kernels.pallas.gemm import gemm
from assay.kernels.pallas.rmsnorm import rmsnorm
from assay.kernels.pallas.softmax import softmax

ENTRIES = {entry.name: entry for entry in entries() if entry.group == "pallas"}
SIZES = {  # with tails, and with three blocks where there are any
    "softmax": {"R": 17, "N": 37},
    "rmsnorm": {"R": 17, "N": 37},
    "gemm": {"M": 5, "N": 130, "K": 300},
    "attention": {"B": 1, "H": 4, "Hkv": 2, "Sq": 70, "Sk": 300, "D": 8, "Dv": 8},
}


def test_every_file_of_kernels_is_examined() -> None:
    """Each file that calls Pallas has an entry in the survey's table, and a contract."""
    folder = Path(__file__).resolve().parents[2] / "kernels" / "pallas"
    files = {path.stem for path in folder.glob("*.py") if "pallas_call(" in path.read_text()}
    assert files == {entry.target.partition(":")[0].rpartition(".")[2] for entry in ENTRIES.values()}
    for name in files:
        contract_named(f"pallas.{name}")


def first_failure(kernel: Any, op: str, dtype: str, causal: str = "none") -> str:
    """What is wrong at the sizes above, if anything: among ordinary numbers, whole ones, and with an infinity."""
    options = {"causal": causal} if op == "attention" else {}
    contract = contract_from_table(contract_named(f"pallas.{op}"))
    bench = Bench(Call(kernel, {name: [value] for name, value in options.items()}, "jax"), contract)
    names = [tensor.name for tensor in spec(op).tensors]
    complete = spec(op).complete(options)
    plain = Case(op, SIZES[op], dict.fromkeys(names, dtype), complete)
    last = tuple(size - 1 for size in plain.shape(spec(op).tensors[-1]))
    for case in (
        plain,
        replace(plain, values=dict.fromkeys(names, "integers"), seed=1),
        replace(plain, edits=((names[-1], last, math.inf),), seed=2),
    ):
        failure = bench.try_case(case).failure
        if failure is not None:
            return f"{failure.kind}: {failure.message}"
    return ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", SIZES)
def test_a_bundled_kernel_keeps_its_contract(op: str, dtype: str) -> None:
    """Over several blocks and their tails; `test_bundled_kernels_at_length` examines."""
    kernel = getattr(importlib.import_module(f"assay.kernels.pallas.{op}"), op)
    assert first_failure(kernel, op, dtype) == ""


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("entry", "dtype"),
    [(entry, dtype) for entry in ENTRIES.values() for dtype in entry.dtypes],
    ids=lambda part: getattr(part, "name", part),
)
def test_bundled_kernels_at_length(entry: Entry, dtype: str) -> None:
    """At all sizes of the table and in each dtype."""
    (job,) = plan([replace(entry, dtypes=(dtype,))], examples=100, threads=1)
    verdict = examine_job(job, lambda *told: None)
    assert verdict.outcome == "PASS", str(verdict)


FAULTS = {
    "maximum and sum in the input's dtype": (
        "softmax", "x = x_ref[...].astype(jnp.float32)", "x = x_ref[...]", "bfloat16", "none",
    ),
    "sum of squares in the input's dtype": (
        "rmsnorm", "jnp.mean(x * x, axis=1", "jnp.mean((x * x).astype(x_ref.dtype), axis=1", "bfloat16", "none",
    ),
    "rows of the first block only": ("softmax", "lambda i: (i, 0)", "lambda i: (0, 0)", "float32", "none"),
    "the tail of K is whatever lies behind it": (
        "gemm", "left = inner - block * _BLOCK_K", "left = _BLOCK_K", "float32", "none",
    ),
    "an accumulator of the input's dtype": (
        "gemm", "pltpu.VMEM((_BLOCK_M, _BLOCK_N), jnp.float32)", "pltpu.VMEM((_BLOCK_M, _BLOCK_N), a.dtype)",
        "bfloat16", "none",
    ),
    "the accumulator starts anew with every block": (
        "gemm", "@pl.when(block == 0)", "@pl.when(True)", "float32", "none",
    ),
    "no block from the third on (jax#38497)": (
        "gemm", "acc_ref[...] += ", "acc_ref[...] += (block < 2) * ", "float32", "none",
    ),
    "queries are not aligned with the last key": (
        "attention", "keys - queries,", "0,", "float32", "bottom_right",
    ),
    "the sums are not rescaled": (
        "attention", "acc_ref[...] = acc_ref[...] * rescale +", "acc_ref[...] = acc_ref[...] +", "float32", "none",
    ),
    "keys behind the end are seen": ("attention", "seen = key < keys if", "seen = key < key + 1 if", "float32", "none"),
    "every query head has a key head of its own": (
        "attention", "jax.lax.div(h, jnp.asarray(shared, h.dtype))", "h", "float32", "none",
    ),
}  # fmt: skip


def faulty(op: str, right: str, wrong: str) -> Any:
    """The bundled kernel with one place of its source replaced."""
    original = importlib.import_module(f"assay.kernels.pallas.{op}")
    source = Path(str(original.__file__)).read_text(encoding="utf-8")
    assert source.count(right) >= 1
    module = types.ModuleType(f"faulty_{op}")
    exec(compile(source.replace(right, wrong), f"faulty {op}", "exec"), vars(module))
    return getattr(module, op)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_kernel_is_found(name: str) -> None:
    """Each replacement alone makes a kernel fail that passes without it."""
    op, right, wrong, dtype, causal = FAULTS[name]
    assert first_failure(faulty(op, right, wrong), op, dtype, causal) != ""


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.ones(shape, dtype)


WRONG: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "integers": (softmax, (ones(2, 3, dtype=jnp.int32),), {}, TypeError, "x"),
    "no jax array": (softmax, ([[1.0]],), {}, TypeError, "x"),
    "three dimensions": (softmax, (ones(2, 3, 4),), {}, ValueError, "x"),
    "a longer weight": (rmsnorm, (ones(2, 3), ones(4)), {}, ValueError, "weight"),
    "factors that don't meet": (gemm, (ones(2, 3), ones(4, 2)), {}, ValueError, "b"),
    "factors of two dtypes": (gemm, (ones(2, 3), ones(3, 2, dtype=jnp.bfloat16)), {}, TypeError, "b"),
    "heads that share nothing": (
        attention, (ones(1, 3, 2, 8), ones(1, 2, 2, 8), ones(1, 2, 2, 8)), {}, ValueError, "k",
    ),
    "an unknown mask": (attention, (ones(1, 1, 2, 8),) * 3, {"causal": "left"}, ValueError, "causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    """Another dtype, shape or option raises an error that begins with the argument's name."""
    function, arguments, options, error, argument = WRONG[name]
    with pytest.raises(error, match=rf"^{argument}: expected "):
        function(*arguments, **options)


def test_nothing_in_nothing_out() -> None:
    """Empty arrays have results of the right shape, and a sum over nothing is zero."""
    assert softmax(ones(0, 3)).shape == (0, 3)
    assert rmsnorm(ones(3, 0), ones(0)).shape == (3, 0)
    assert gemm(ones(2, 0), ones(0, 3)).tolist() == [[0.0] * 3] * 2
    assert attention(ones(1, 2, 3, 8), ones(1, 1, 0, 8), ones(1, 1, 0, 4)).shape == (1, 2, 3, 4)
