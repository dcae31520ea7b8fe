"""The Pallas kernels, interpreted on a CPU: arguments, contracts, and faults of `pallas_faults.toml`, which are found.

A usual run plants the first fault of each kernel, ``./dev test -m evidence`` the others.
"""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from assay.verify.campaign.survey import examine_job, plan
from assay.verify.campaign.table import Entry, entries
from assay.verify.harness.frameworks import keep_roundings
from tests.kernels.planting import first_failure, kernel_of, planted, public_functions

pytest.importorskip("jax")

import jax.numpy as jnp

from assay.kernels.pallas import arguments, gpu
from assay.kernels.pallas.add_rmsnorm import add_rmsnorm
from assay.kernels.pallas.attention import attention, attention_backward
from assay.kernels.pallas.attention_decode import attention_decode
from assay.kernels.pallas.calls import as_on_gpu
from assay.kernels.pallas.causal_conv1d import causal_conv1d, causal_conv1d_backward
from assay.kernels.pallas.cross_entropy import cross_entropy, cross_entropy_backward
from assay.kernels.pallas.gemm import gemm
from assay.kernels.pallas.gemm_scaled import gemm_fp8, gemm_int8
from assay.kernels.pallas.layernorm import layernorm, layernorm_backward
from assay.kernels.pallas.moe import moe
from assay.kernels.pallas.rmsnorm import rmsnorm, rmsnorm_backward
from assay.kernels.pallas.rope import rope, rope_backward
from assay.kernels.pallas.selective_scan import selective_scan
from assay.kernels.pallas.softmax import softmax, softmax_backward
from assay.kernels.pallas.swiglu import swiglu, swiglu_backward

keep_roundings()  # before JAX's backend starts

ENTRIES = {entry.name: entry for entry in entries() if entry.group == "pallas"}
ON_GPU = {name: ENTRIES[name.removesuffix(" (gpu)")] for name in ENTRIES if name.endswith(" (gpu)")}
FOLDER = Path(arguments.__file__).parent
SIZES = {  # with tails, and with several blocks where there are any
    "pallas.softmax": {"R": 300, "N": 37},
    "pallas.softmax_backward": {"R": 300, "N": 37},
    "pallas.rmsnorm": {"R": 300, "N": 37},
    "pallas.rmsnorm_backward": {"R": 300, "N": 37},
    "pallas.gemm": {"M": 5, "N": 130, "K": 300},
    "pallas.attention": {"B": 1, "H": 4, "Hkv": 2, "Sq": 150, "Sk": 300, "D": 8, "Dv": 8},
    "pallas.attention_backward": {"B": 1, "H": 4, "Hkv": 2, "Sq": 150, "Sk": 300, "D": 8, "Dv": 8},
    "pallas.layernorm": {"R": 300, "N": 37},
    "pallas.layernorm_backward": {"R": 300, "N": 37},
    "pallas.add_rmsnorm": {"R": 300, "N": 37},
    "pallas.swiglu": {"R": 300, "N": 37},
    "pallas.swiglu (limit)": {"R": 300, "N": 37},
    "pallas.swiglu_backward": {"R": 300, "N": 37},
    "pallas.rope": {"B": 2, "S": 300, "H": 3, "D": 64},
    "pallas.rope_backward": {"B": 2, "S": 300, "H": 3, "D": 64},
    "pallas.gemm_int8": {"M": 5, "N": 130, "K": 300},
    "pallas.gemm_fp8": {"M": 5, "N": 130, "K": 300},
    "pallas.cross_entropy": {"T": 130, "V": 700},
    "pallas.cross_entropy (softcap)": {"T": 130, "V": 700},
    "pallas.cross_entropy_backward": {"T": 130, "V": 700},
    "pallas.cross_entropy_backward (softcap)": {"T": 130, "V": 700},
    "pallas.attention_decode": {"B": 3, "H": 4, "Hkv": 2, "D": 40, "P": 14, "page": 16, "max_pages": 4},
    "pallas.attention_decode (8-bit cache)": {"B": 3, "H": 4, "Hkv": 2, "D": 40, "P": 14, "page": 16, "max_pages": 4},
    "pallas.moe": {"T": 70, "D": 130, "F": 140, "E": 3, "k": 2},
    "pallas.causal_conv1d": {"B": 2, "D": 300, "L": 37, "W": 4},
    "pallas.causal_conv1d_backward": {"B": 2, "D": 300, "L": 37, "W": 4},
    "pallas.selective_scan": {"B": 2, "D": 300, "L": 37, "S": 3},
    "pallas.softmax (gpu)": {"R": 150, "N": 37},
    "pallas.softmax_backward (gpu)": {"R": 150, "N": 37},
    "pallas.rmsnorm (gpu)": {"R": 150, "N": 37},
    "pallas.rmsnorm_backward (gpu)": {"R": 150, "N": 2050},
    "pallas.layernorm (gpu)": {"R": 150, "N": 37},
    "pallas.layernorm_backward (gpu)": {"R": 150, "N": 2050},
    "pallas.add_rmsnorm (gpu)": {"R": 150, "N": 37},
    "pallas.swiglu (gpu)": {"R": 150, "N": 37},
    "pallas.swiglu_backward (gpu)": {"R": 150, "N": 37},
    "pallas.rope (gpu)": {"B": 2, "S": 30, "H": 3, "D": 64},
    "pallas.rope_backward (gpu)": {"B": 2, "S": 30, "H": 3, "D": 64},
    "pallas.cross_entropy (gpu)": {"T": 30, "V": 700},
    "pallas.cross_entropy_backward (gpu)": {"T": 30, "V": 700},
    "pallas.gemm (gpu)": {"M": 5, "N": 70, "K": 100},
    "pallas.attention (gpu)": {"B": 1, "H": 4, "Hkv": 2, "Sq": 70, "Sk": 90, "D": 8, "Dv": 8},
    "pallas.attention_backward (gpu)": {"B": 1, "H": 4, "Hkv": 2, "Sq": 70, "Sk": 90, "D": 8, "Dv": 8},
}
FAULTS = tomllib.loads(Path(__file__).with_name("pallas_faults.toml").read_text())
PLANTED = [
    pytest.param(name, fault, id=f"{name}: {fault['name']}", marks=pytest.mark.evidence if later else ())
    for name, faults in FAULTS.items()
    for later, fault in enumerate(faults)
]


def test_every_kernel_is_examined() -> None:
    """Each function that takes arguments of users is named by an entry of the survey's table, and has five faults."""
    public = public_functions(FOLDER)
    assert public == {entry.target for name, entry in ENTRIES.items() if name not in ON_GPU}
    assert ENTRIES.keys() == SIZES.keys()
    planted_in = [ENTRIES[name].target for name, faults in FAULTS.items() for _ in faults]
    assert all(planted_in.count(target) >= 5 for target in public)


def test_every_grid_for_gpus_is_examined() -> None:
    """Each function of `gpu` is named by an entry, as the same function with its grid for TPUs is: same op, contract
    and dtypes."""
    functions = {f"{gpu.__name__}:{name}" for name, value in vars(gpu).items() if hasattr(value, "__wrapped__")}
    assert functions == {ENTRIES[name].target for name in ON_GPU}
    for name, other in ON_GPU.items():
        entry, wrapped = ENTRIES[name], kernel_of(ENTRIES[name]).__wrapped__
        assert wrapped is kernel_of(other)
        assert entry.dtypes == other.dtypes
        assert (entry.settings.spec, entry.settings.contract) == (other.settings.spec, other.settings.contract)


@pytest.mark.parametrize("name", SIZES)
def test_a_bundled_kernel_keeps_its_contract(name: str) -> None:
    """Over several blocks and their tails, under the first options; `test_bundled_kernels_at_length` examines."""
    entry = ENTRIES[name]
    options = {name: values[0] for name, values in entry.settings.options.items()}
    assert first_failure(kernel_of(entry), entry, SIZES[name], (entry.survey_dtypes or ("",))[0], options) == ""


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


def own_file(name: str) -> str:
    return ON_GPU.get(name, ENTRIES[name]).target.partition(":")[0].rpartition(".")[2]


def test_every_fault_can_be_planted() -> None:
    for name, faults in FAULTS.items():
        for fault in faults:
            source = (FOLDER / f"{fault.get('file', own_file(name))}.py").read_text()
            assert fault["old"] in source, f"{name}: {fault['name']}"


@pytest.mark.parametrize(("name", "fault"), PLANTED)
def test_a_planted_fault_is_found(name: str, fault: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES[name]
    faulty = planted(ON_GPU.get(name, entry), {"file": own_file(name), **fault}, monkeypatch)
    faulty = as_on_gpu(faulty) if name in ON_GPU else faulty
    dtype, options = fault.get("dtype", "float32"), fault.get("options", {})
    assert first_failure(faulty, entry, SIZES[name], dtype, options) != ""


def ones(*shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.ones(shape, dtype)


def eight(*shape: int) -> Any:
    return jnp.ones(shape, jnp.int8)


def labels(count: int) -> Any:
    return jnp.zeros(count, jnp.int32)


def paged(query_heads: int, key_heads: int) -> list[Any]:
    """A query of one sequence, and caches of two pages of four slots."""
    return [ones(1, query_heads, 8), *[ones(2, 4, key_heads, 8)] * 2]


def experts(count: int) -> list[Any]:
    """Two tokens of width 4, and the weights of so many experts of width 3."""
    return [ones(2, 4), ones(count, 6, 4), ones(count, 4, 3)]


def heads(*of: int, dtype: Any = jnp.float32) -> list[Any]:
    """q, k, v or dout, of one sequence and two places of 8 elements, with so many heads each."""
    return [ones(1, count, 2, 8, dtype=dtype) for count in of]


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "integers": (lambda: softmax(ones(2, 3, dtype=jnp.int32)), TypeError, "x"),
    "no jax array": (lambda: softmax([[1.0]]), TypeError, "x"),  # type: ignore[arg-type]
    "three dimensions": (lambda: softmax(ones(2, 3, 4)), ValueError, "x"),
    "a gradient of other rows": (lambda: softmax_backward(ones(2, 3), ones(3, 3)), ValueError, "dy"),
    "a longer weight": (lambda: rmsnorm(ones(2, 3), ones(4)), ValueError, "weight"),
    "a gradient of integers": (
        lambda: rmsnorm_backward(ones(2, 3), ones(3), ones(2, 3, dtype=jnp.int32)), TypeError, "dy",
    ),
    "factors that don't meet": (lambda: gemm(ones(2, 3), ones(4, 2)), ValueError, "b"),
    "factors of two dtypes": (lambda: gemm(ones(2, 3), ones(3, 2, dtype=jnp.bfloat16)), TypeError, "b"),
    "heads that share nothing": (lambda: attention(*heads(3, 2, 2)), ValueError, "k"),
    "an unknown mask": (lambda: attention(*heads(1, 1, 1), causal="left"), ValueError, "causal"),
    "a gradient of other heads": (lambda: attention_backward(*heads(2, 1, 1, 1)), ValueError, "dout"),
    "a longer bias": (lambda: layernorm(ones(2, 3), ones(3), ones(4)), ValueError, "bias"),
    "a gradient of other columns": (lambda: layernorm_backward(ones(2, 3), ones(3), ones(2, 4)), ValueError, "dy"),
    "a longer residual": (lambda: add_rmsnorm(ones(2, 3), ones(3, 3), ones(3)), ValueError, "residual"),
    "another gate": (lambda: swiglu(ones(2, 3), ones(2, 4)), ValueError, "up"),
    "a limit of zero": (lambda: swiglu(ones(2, 3), ones(2, 3), limit=0.0), ValueError, "limit"),
    "no gradient": (lambda: swiglu_backward(ones(2, 3), ones(2, 3), None), TypeError, "dy"),  # type: ignore[arg-type]
    "an odd head": (lambda: rope(ones(1, 2, 3, 5), ones(2, 2), ones(2, 2)), ValueError, "x"),
    "other places": (lambda: rope_backward(ones(2, 2), ones(3, 2), ones(1, 2, 3, 4)), ValueError, "sin"),
    "factors of 16 bits": (lambda: gemm_int8(ones(2, 3), ones(3, 2), ones(2, 1), ones(1, 2)), TypeError, "a"),
    "a scale too few": (lambda: gemm_int8(eight(2, 3), eight(3, 2), ones(1, 1), ones(1, 2)), ValueError, "scale_a"),
    "a sum that is too long": (
        lambda: gemm_int8(eight(1, 2**17), eight(2**17, 1), ones(1, 1), ones(1, 1)), ValueError, "a",
    ),
    "no float of 8 bits": (lambda: gemm_fp8(eight(2, 3), eight(3, 2), ones(), ones()), TypeError, "a"),
    "an unknown granularity": (
        lambda: gemm_fp8(eight(2, 3), eight(3, 2), ones(), ones(), granularity="column"), ValueError, "granularity",
    ),
    "labels of 8 bits": (lambda: cross_entropy(ones(2, 3), eight(2)), TypeError, "target"),
    "no classes": (lambda: cross_entropy(ones(2, 0), labels(2)), ValueError, "logits"),
    "all of it smoothed": (
        lambda: cross_entropy(ones(2, 3), labels(2), label_smoothing=1.5), ValueError, "label_smoothing",
    ),
    "a cap of zero": (lambda: cross_entropy(ones(2, 3), labels(2), softcap=0.0), ValueError, "softcap"),
    "another reduction": (
        lambda: cross_entropy_backward(ones(2, 3), labels(2), reduction="max"), ValueError, "reduction",
    ),
    "a gradient too many": (lambda: cross_entropy_backward(ones(2, 3), labels(2), ones(2)), ValueError, "dloss"),
    "a table of floats": (lambda: attention_decode(*paged(2, 1), ones(1, 2), labels(1)), TypeError, "block_table"),
    "lengths of other sequences": (
        lambda: attention_decode(*paged(2, 1), jnp.zeros((1, 2), jnp.int32), labels(2)), ValueError, "seq_lens",
    ),
    "key heads that share nothing": (
        lambda: attention_decode(*paged(3, 2), jnp.zeros((1, 2), jnp.int32), labels(1)), ValueError, "k_cache",
    ),
    "no experts": (lambda: moe(*experts(0), ones(2, 1), labels(2)[:, None]), ValueError, "w_down"),
    "taps of other channels": (lambda: causal_conv1d(ones(1, 2, 3), ones(3, 4), ones(2)), ValueError, "weight"),
    "an unknown activation": (
        lambda: causal_conv1d(ones(1, 2, 3), ones(2, 4), ones(2), activation="gelu"), ValueError, "activation",
    ),
    "a gradient of other places": (
        lambda: causal_conv1d_backward(ones(1, 2, 3), ones(2, 4), ones(2), ones(1, 2, 4)), ValueError, "dy",
    ),
    "decays of 16 bits": (
        lambda: selective_scan(
            ones(1, 2, 3), ones(1, 2, 3), ones(2, 4, dtype=jnp.bfloat16), ones(1, 4, 3), ones(1, 4, 3), ones(2)
        ), TypeError, "a",
    ),
    "other states": (
        lambda: selective_scan(ones(1, 2, 3), ones(1, 2, 3), ones(2, 4), ones(1, 4, 3), ones(1, 3, 3), ones(2)),
        ValueError, "c",
    ),
    "weights without ids": (lambda: moe(*experts(3), ones(2, 2), labels(2)[:, None]), ValueError, "weights"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    call, error, argument = WRONG[name]
    with pytest.raises(error, match=rf"^{argument}: expected "):
        call()


def test_nothing_in_nothing_out() -> None:
    assert softmax(ones(0, 3)).shape == (0, 3)
    assert rmsnorm(ones(3, 0), ones(0)).shape == (3, 0)
    assert gemm(ones(2, 0), ones(0, 3)).tolist() == [[0.0] * 3] * 2
    assert attention(ones(1, 2, 3, 8), ones(1, 1, 0, 8), ones(1, 1, 0, 4)).shape == (1, 2, 3, 4)
