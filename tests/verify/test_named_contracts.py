"""Contracts by name: their fields for an op, what they are composed with, and kernels that keep and break them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from assay.cli.settings import contract_fields
from assay.golden.lowering.spec import STAGES
from assay.golden.registry import spec, specs
from assay.kernels.libraries.pytorch_eager import rms_norm_cast_before_weight
from assay.verify import Contract, examine
from assay.verify.contract import contract_from_table
from assay.verify.errors import ContractError
from assay.verify.named_contracts import bases, contract_named, fields_of_base
from assay.verify.settings import Settings
from tests.zoo import rounding
from tests.zoo.functions import silu
from tests.zoo.numerics import store_flushed

NAMES = ("flash-attention-2", "torch", "transformers", "triton-default", "xla-cpu")
F32, BF16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
SMALL = {"Sq": range(1, 40), "Sk": range(1, 40), "D": [16], "Dv": [16]}


def silu_flushed(x: Tensor) -> Tensor:
    """Subnormals are zero."""
    return silu(x, store=store_flushed)


KEPT: dict[str, tuple[str, Callable[..., Any], dict[str, Any], str]] = {
    "transformers, norm": ("rmsnorm", rms_norm_cast_before_weight, BF16, "transformers"),
    "transformers, attention": (
        "attention", rounding.attention_rounding_scores, {**BF16, "shapes": SMALL}, "transformers",
    ),
    "torch": ("swiglu", rounding.swiglu_rounding, BF16, "torch"),
    "triton-default": ("gemm", rounding.gemm_tf32, F32, "triton-default"),
    "xla-cpu": ("silu", silu_flushed, F32, "xla-cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "kernel", "settings", "name"), KEPT.values(), ids=KEPT)
def test_a_kernel_keeps_the_contract_of_its_kind(
    op: str, kernel: Callable[..., Any], settings: dict[str, Any], name: str
) -> None:
    """Under the name it passes, and under another that doesn't allow what it does it doesn't pass cleanly."""
    asked: dict[str, Any] = {**settings, "examples": 2, "every_aspect": False, "shrinking": False}
    found = examine(kernel, op, contract=name, **asked)
    assert found.outcome == "PASS", str(found)
    assert found.contract.startswith(name)
    assert examine(kernel, op, **asked).outcome in ("FAIL", "WARN")


def test_there_are_these() -> None:
    """Each says where its fields come from, and has fields of every op that it may be asked about."""
    assert bases() == NAMES
    for name in NAMES:
        for op in specs():
            made = Contract(base=name).of(spec(op))
            assert made == made.of(spec(op))
            assert set(made.stages or {}) <= set(spec(op).stages)


def test_tables_name_stages_and_ops_that_there_are() -> None:
    """No field of a named contract is dead: each stage is one of some op, and each table is an op's."""
    known = {stage for op in specs() for stage in spec(op).stages} | STAGES.keys()
    for name in NAMES:
        assert set(fields_of_base(name, "").get("stages", {})) <= known
    assert fields_of_base("torch", "silu")["nonfinite"] == "unspecified"


def test_a_base_is_composed_with_fields() -> None:
    """Fields given stand on top; stages and ulps are added to those of the base, and the rest of an op's stay."""
    made = Contract(base="transformers", ulps={"exp": 4}, stages={"scores": None}).of(spec("attention"))
    assert made.stages == {"query": None, "scores": None, "probabilities": "input"}
    assert (made.ulps["exp"], made.ulps["div"], made.masked_rows) == (4, 2, "any")
    assert Contract(base="transformers").of(spec("attention_decode")).masked_rows == "zero"
    assert Contract(base="transformers").of(spec("softmax")).stages is None


def test_a_name_travels() -> None:
    """By table, command line and settings the same contract comes out, and it says its name."""
    settings = Settings("rmsnorm", dtype="bfloat16", contract="transformers")  # type: ignore[arg-type]
    assert settings.contract.stages == {"normalized": "input"}
    assert Settings.from_table(settings.as_table()) == settings
    assert str(settings.contract) == "transformers, stages={'normalized': 'input'}, subnormals='flush'"
    fields = contract_fields(["transformers", "ulps.exp=4"])
    assert contract_from_table(fields) == Contract(base="transformers", ulps={"exp": 4})
    assert contract_from_table("xla-cpu") == Contract(base="xla-cpu")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    """Bases and tables alike."""
    with pytest.raises(ContractError, match="did you mean 'transformers'"):
        Contract(base="transformer")
    with pytest.raises(ContractError, match="did you mean 'transformers'"):
        contract_named("transfomers")
    with pytest.raises(ContractError, match=r"did you mean 'triton\.softmax'"):
        examine(partial(silu), "silu", dtype="float32", contract="triton.sofmax")
