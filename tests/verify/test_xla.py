"""JAX on a CPU: roundings on the way are kept, or a verdict says that they may vanish; XLA's flush is admitted."""

import os
import subprocess
import sys
from typing import Any

import pytest

from assay.verify import Contract, examine
from assay.verify.findings import Findings
from assay.verify.harness import frameworks as xla
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
    assert said("") == "FAIL False ['maximum_in_input_dtype']"


def test_where_jax_has_started_a_verdict_says_that_roundings_may_vanish() -> None:
    """The flag comes too late after the first array: the same kernel passes, and the verdict says what it is worth."""
    assert said("jnp.zeros(3).sum().block_until_ready()") == "PASS True []"


def test_flags_that_are_set_stay() -> None:
    assert said("", XLA_FLAGS="--xla_allow_excess_precision=true") == "PASS True []"


def test_subnormals_may_be_flushed_by_xla_unless_the_contract_says_otherwise() -> None:
    assert Settings("softmax", "bfloat16", framework="jax").contract == Contract(subnormals="flush")
    assert Settings("softmax", "bfloat16").contract == Contract()
    kept = Contract(subnormals="keep")
    assert Settings("softmax", "bfloat16", framework="jax", contract=kept).contract == kept


def test_a_report_says_how_roundings_are_kept() -> None:
    found = Findings("PASS", "k", "softmax", "bfloat16", "", unrounded=True)
    assert "XLA_FLAGS=--xla_allow_excess_precision=false" in text_report(found)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of a process's maps")
def test_what_was_compiled_is_forgotten_before_it_fills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    asked: dict[str, Any] = {"shapes": {"R": range(1, 9), "N": range(1, 99)}, "examples": 30, "layouts": ["contiguous"]}

    def grown(most: int) -> int:
        """How many maps an examination has added by the last look at them."""
        seen: list[int] = []
        counted, before = xla._maps, xla._maps()
        with monkeypatch.context() as patch:
            patch.setattr(xla, "_maps", lambda: seen.append(counted()) or seen[-1])
            patch.setattr(xla, "_most_maps", lambda: most)
            kernel = jax.jit(lambda x: jax.nn.softmax(x, -1))
            found = examine(kernel, "softmax", dtype="float32", framework="jax", effort="quick", **asked)
        assert found.outcome == "PASS"
        return seen[-1] - before

    free = grown(10**9)
    jax.clear_caches()
    held = grown(0)
    assert held < free / 2, (held, free)
