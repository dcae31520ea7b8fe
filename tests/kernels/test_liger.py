"""The adapters of Liger-Kernel: each computes what its spec says, and its findings are Liger's, not the adapter's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("liger_kernel")

from liger_kernel.ops.group_norm import group_norm_forward

from assay.golden import evaluate
from assay.interpreter import faithful
from assay.kernels.libraries import liger
from assay.verify import Contract, examine
from assay.verify.campaign.table import Entry, entries
from assay.verify.cases.case import Case, build
from assay.verify.contract import contract_from_table
from assay.verify.harness.target import load_target
from assay.verify.named_contracts import contract_named

ENTRIES = [entry for entry in entries() if entry.group == "liger"]
ROWS = {"R": 3, "N": 37}
SIZES = {
    "rope": {"B": 2, "S": 5, "H": 3, "D": 12},
    "attention": {"B": 1, "H": 2, "Hkv": 2, "Sq": 72, "Sk": 72, "D": 40, "Dv": 40},
    "moe": {"T": 9, "D": 17, "F": 19, "E": 4, "k": 3},
}
CLOSE = {"float32": 4e-3, "bfloat16": 4e-2, "float16": 4e-3}  # float32: Triton's products of it are TF32
FEW = {"shapes": {"R": [1, 3], "N": [1, 37]}, "examples": 0}


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with faithful():
        yield


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_adapter_computes_its_spec(entry: Entry) -> None:
    """In every dtype and for every option that the survey lists, to a coarse part of the largest value."""
    for dtype in entry.dtypes:
        for options in _option_sets(entry):
            case = _case(entry, dtype, options)
            inputs = [guarded.tensor for guarded in build(case).guarded.values()]
            right = evaluate(entry.settings.spec, *(tensor.clone() for tensor in inputs), **options)
            got = load_target(entry.target)(*inputs, **options)
            for part, golden in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, right)), strict=True):
                close = CLOSE[next(iter(case.dtypes.values()))] * golden.value.abs().max()
                assert bool(((part.double() - golden.value).abs() <= close).all())


def _option_sets(entry: Entry) -> Iterator[dict[str, Any]]:
    first = {name: values[0] for name, values in entry.settings.options.items()}
    yield first
    for name, values in entry.settings.options.items():
        yield from ({**first, name: value} for value in values[1:])


def _case(entry: Entry, dtype: Any, options: dict[str, Any]) -> Case:
    sizes = SIZES.get(entry.settings.spec, ROWS)
    plain = Case(entry.settings.spec, sizes, {}, options)
    dtypes = {
        tensor.name: tensor.dtype or (dtype if isinstance(dtype, str) else dtype[tensor.name])
        for tensor in plain.signature.tensors
    }
    return Case(entry.settings.spec, sizes, dtypes, options)


def test_every_adapter_is_in_the_survey() -> None:
    """Each public function of the module is some entry's target."""
    own = {name for name, value in vars(liger).items() if getattr(value, "__module__", "") == liger.__name__}
    assert own == {entry.target.partition(":")[2] for entry in ENTRIES}


def test_what_liger_documents_decides() -> None:
    """In Llama's casting mode the normalised row is rounded: allowed by its documented contract, not by the default."""
    settings: dict[str, Any] = {"dtype": "bfloat16", **FEW}
    assert examine(liger.rms_norm_llama, "rmsnorm", **settings).outcome == "FAIL"
    documented = contract_from_table(contract_named("liger.rms_norm_llama"))
    assert examine(liger.rms_norm_llama, "rmsnorm", contract=documented, **settings).passed
    assert examine(liger.rms_norm_gemma, "rmsnorm", **settings).passed


def test_swiglu_rounds_on_the_way() -> None:
    """In bfloat16 silu(gate) is rounded before it multiplies; with bfloat16 inside, the numbers are right."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "shapes": {"R": range(1, 18)}, "examples": 0}
    verdict = examine(liger.swiglu, "swiglu", **settings)
    assert verdict.failure is not None
    assert verdict.failure.kind == "contract"
    inside = Contract(compute="bfloat16", nonfinite="unspecified")
    assert examine(liger.swiglu, "swiglu", contract=inside, **settings).passed


def test_the_rotation_writes_into_the_callers_tensor() -> None:
    """Where the queries already lie as the kernel wants them it overwrites them; the adapter of the survey copies."""
    x, cos, sin = torch.ones(1, 2, 1, 4), torch.zeros(2, 2), torch.ones(2, 2)
    liger.rope(x, cos, sin)
    assert bool((x == 1).all())
    liger.rope_inplace(x, cos, sin)
    assert not bool((x == 1).all())


def test_group_norm_loses_its_digits() -> None:
    """The variance is E[x^2] - E[x]^2, so that rows far from zero are wrong; two passes are right."""

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, groups: int, eps: float) -> Any:
        return group_norm_forward(x, x.shape[1], groups, weight, bias, eps)[0]

    def two_passes(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, groups: int, eps: float) -> Any:
        return torch.native_group_norm(x, weight, bias, x.shape[0], x.shape[1], x.shape[2], groups, eps)[0]

    sizes = {"B": [1], "C": [4], "L": [4, 64]}
    settings: dict[str, Any] = {"dtype": "float32", "shapes": sizes, "layouts": ["contiguous"], "examples": 5}
    settings |= {"options": {"groups": [2], "eps": [1e-5]}, "every_aspect": False, "effort": "quick"}
    verdict = examine(kernel, "group_norm", **settings)
    assert verdict.failure is not None
    assert verdict.failure.kind == "contract"
    assert "E[x^2] - E[x]^2" in str(verdict)
    assert examine(two_passes, "group_norm", **settings).passed


def test_products_of_float32_are_tf32() -> None:
    """The mixture of experts multiplies float32 as Triton does by default: with ten bits after the point."""
    one = torch.ones(1, 1, 1)
    x = torch.tensor([[1 + 2.0**-11]])
    weights, ids = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    gate_up = torch.cat((64 * one, one), dim=1)
    assert liger.moe(x, gate_up, one, weights, ids).item() == 64.0
    assert torch.nn.functional.silu(64 * x).item() * x.item() > 64.0
