"""`assay op`: each op is described, and its example runs and passes (`ASSAY_OPS=94` tries all of them)."""

import os
import runpy
from pathlib import Path

import pytest

from assay.cli.main import main
from assay.golden import spec, specs
from assay.verify.report.op import example_text, facts, op_in_words

STEP = len(specs()) // int(os.environ.get("ASSAY_OPS", "3"))


def test_every_op_is_described() -> None:
    for name in specs():
        op, described = spec(name), list(facts(spec(name)))
        headings = [heading for heading, _ in described]
        assert headings[0] == "computes"
        assert {"call", "takes", "returns", "contract"} <= set(headings)
        words = " ".join(words for _, words in described)
        assert [each.name for each in (*op.tensors, *op.signature().returns) if f"{each}: " not in words] == []
        assert [key for key in (*op.options, *op.stages) if key not in words] == []


def test_packed_operands_have_their_layouts() -> None:
    words = op_in_words("gemm_int4")
    assert "the first in the low nibble" in words
    assert 'with packing="awq": qweight[K,N/8]: int32' in words
    assert "moe_route" not in words
    assert "ties" in op_in_words("moe_route")


@pytest.mark.parametrize("name", specs()[2::STEP])
def test_the_example_runs_and_passes(name: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example_text(name).replace('effort="quick"', 'effort="quick", examples=0'))
    runpy.run_path(str(script))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["op", "softmax"]) == 0
    assert "exp(x) / sum exp(x)" in capsys.readouterr().out
    assert main(["op"]) == 0
    assert tuple(capsys.readouterr().out.split()) == specs()
    assert main(["op", "sofmax"]) == 2
    assert "did you mean 'softmax'?" in capsys.readouterr().err
