"""JAX on a CPU: roundings on the way are kept, or a verdict says that they may vanish; XLA's flush is admitted."""

import os
import subprocess
import sys

import pytest

from assay.verify import Contract
from assay.verify.findings import Findings
from assay.verify.report.text import text_report
from assay.verify.settings import Settings

pytest.importorskip("jax")

PROGRAM = """
import jax.numpy as jnp
{before}
from jax.experimental.pallas.ops.gpu.softmax import softmax
from assay.verify import examine
found = examine(lambda x: softmax(x, axis=-1, interpret=True), "softmax", dtype="bfloat16", framework="jax",
                shapes={{"R": [2], "N": [32]}}, examples=3, effort="quick", layouts=["contiguous"], every_aspect=False)
print(found.outcome, found.unrounded, [one.name for one in found.explanations])
"""


def said(before: str, **environment: str) -> str:
    """What a process of its own prints of JAX's published GPU softmax, which subtracts the maximum in bfloat16."""
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", PROGRAM.format(before=before)]
    found = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_a_rounding_that_xla_would_drop_is_judged() -> None:
    """Importing JAX starts no backend: the flag still counts, and the known fault is found and named."""
    assert said("") == "FAIL False ['maximum_in_input_dtype']"


def test_where_jax_has_started_a_verdict_says_that_roundings_may_vanish() -> None:
    """The flag comes too late after the first array: the same kernel passes, and the verdict says what it is worth."""
    assert said("jnp.zeros(3).sum().block_until_ready()") == "PASS True []"


def test_flags_that_are_set_stay() -> None:
    """What XLA_FLAGS says of excess precision is left alone."""
    assert said("", XLA_FLAGS="--xla_allow_excess_precision=true") == "PASS True []"


def test_subnormals_may_be_flushed_by_xla_unless_the_contract_says_otherwise() -> None:
    """On a CPU, in JAX, and only where nothing is named."""
    assert Settings("softmax", "bfloat16", framework="jax").contract == Contract(subnormals="flush")
    assert Settings("softmax", "bfloat16").contract == Contract()
    kept = Contract(subnormals="keep")
    assert Settings("softmax", "bfloat16", framework="jax", contract=kept).contract == kept


def test_a_report_says_how_roundings_are_kept() -> None:
    """One line, with the flag to set."""
    found = Findings("PASS", "k", "softmax", "bfloat16", "", unrounded=True)
    assert "XLA_FLAGS=--xla_allow_excess_precision=false" in text_report(found)
