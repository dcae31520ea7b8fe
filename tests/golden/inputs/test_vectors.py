"""Frozen numbers: a seed means the same bits for ever, and a definition's version the same mathematics.

``python -m tests.golden.vectors.freeze`` adds what is new; it changes nothing that is frozen under the same version.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.golden.inputs import values
from assay.golden.registry import spec, specs
from tests.golden.vectors.freeze import DEFINITIONS, DRAWN, INPUTS, contradiction, digest, drawn, kinds, spelled

FROZEN_INPUTS: dict[str, Any] = json.loads(INPUTS.read_text(encoding="utf-8"))
FROZEN_DEFINITIONS: dict[str, Any] = json.loads(DEFINITIONS.read_text(encoding="utf-8"))
SOURCE = Path(values.__file__).parent

# Exact, or rounded once as IEEE 754 says; nothing that a mathematical library or a vector unit does in its own way.
EXACT = {
    *(
        "abs",
        "any",
        "arange",
        "array",
        "asarray",
        "broadcast_to",
        "clip",
        "concatenate",
        "cumsum",
        "diff",
        "errstate",
        "floor",
        "fmod",
        "frexp",
        "full",
        "isinf",
        "isnan",
        "nextafter",
        "swapaxes",
        "tril",
    ),
    *("full_like", "isfinite", "ldexp", "minimum", "maximum", "ones", "rint", "sort", "where", "zeros", "zeros_like"),
    *("inf", "nan", "float64", "int32", "int64", "uint64", "ndarray", "sqrt"),
    *("Tensor", "dtype", "from_numpy", "float32"),  # float32 is on the way of what has been rounded to 8 bits before
}


@pytest.mark.parametrize("name", sorted(FROZEN_INPUTS["digests"]))
def test_inputs_are_frozen(name: str) -> None:
    """Every role, distribution and dtype has the bytes that were written down; others need another version."""
    assert FROZEN_INPUTS["version"] == values.VERSION
    role, kind, dtype = name.split("/")
    assert digest(role, kind, dtype) == FROZEN_INPUTS["digests"][name], "raise assay.golden.inputs.values.VERSION"


def test_numbers_are_spelled_out() -> None:
    """A handful of numbers stands there to be read, so that another implementation can be held against them."""
    assert spelled() == FROZEN_INPUTS["spelled"]


def test_every_role_is_frozen() -> None:
    """What any spec draws has its role among the vectors, with each of its distributions and dtypes."""
    expected = {f"{role}/{kind}/{dtype}" for role in DRAWN for kind in kinds(role) for dtype in DRAWN[role][1]}
    assert expected == set(FROZEN_INPUTS["digests"]), "run python -m tests.golden.vectors.freeze"
    roles = {tensor.role for name in specs() for tensor in spec(name).tensors}
    assert roles <= {role.partition("(")[0] for role in DRAWN}


def test_vectors_see_a_change() -> None:
    """Another seed, tensor or shape has another digest."""
    assert len({bytes(drawn("real", "normal", "float32", seed)[0].numpy()) for seed in range(3)}) == 3
    assert digest("real", "normal", "float32") != digest("real", "wide", "float32")


PROGRAM = """
import json, sys
from tests.golden.vectors.freeze import DRAWN, digest, kinds
print(json.dumps({f"{r}/{k}/{d}": digest(r, k, d) for r in DRAWN for k in kinds(r) for d in DRAWN[r][1]}))
"""


def test_vector_units_change_nothing() -> None:
    """Without the wide vector units of this processor, in numpy and in torch, every byte is the same."""
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched())}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=plain, cwd=root, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == FROZEN_INPUTS["digests"]


def dispatched() -> list[str]:
    """The vector units that numpy would use here and can do without."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]


def inexact(source: str) -> list[str]:
    """The functions of numpy, torch and math in ``source`` that aren't known to be exact, and its powers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="np" | "torch" | "math"), attr=name) if name not in EXACT:
                found.append(name)
            case ast.BinOp(op=ast.Pow(), left=ast.Constant(value=2 | 2.0)):
                continue
            case ast.BinOp(op=ast.Pow()):
                found.append("**")
    return found


def test_nothing_inexact_is_used() -> None:
    """The files that make inputs call nothing whose last bit may differ between platforms."""
    assert {path.name: inexact(path.read_text(encoding="utf-8")) for path in SOURCE.glob("*.py")} == {
        path.name: [] for path in SOURCE.glob("*.py")
    }


@pytest.mark.parametrize("line", ["np.exp2(x)", "math.log(2)", "3.0**0.5", "torch.randn(3)", "np.power(2.0, x)"])
def test_an_inexact_function_is_found(line: str) -> None:
    """The check above sees a logarithm, an exponential, a power and another generator."""
    assert inexact(line)


@pytest.mark.parametrize("name", specs())
def test_definitions_are_frozen(name: str) -> None:
    """Every spec gives the goldens that were frozen under its version: other mathematics needs another version.

    Otherwise a store would go on giving out goldens of the old definition.
    """
    frozen = FROZEN_DEFINITIONS.get(name)
    assert frozen is not None, "run python -m tests.golden.vectors.freeze"
    assert frozen["version"] == spec(name).version, "run python -m tests.golden.vectors.freeze"
    for case in frozen["cases"]:
        assert contradiction(case) is None, f"raise the version of {name} in its definition"


def test_another_definition_is_noticed() -> None:
    """A golden that lies beyond both radii, is of another class, or has another shape contradicts what is frozen."""
    case = FROZEN_DEFINITIONS["softmax"]["cases"][0]
    assert contradiction(case) is None
    for change in (
        lambda x: x * (1 + 1e-9),
        lambda x: x + 1e-9,
        lambda x: float("nan"),
        lambda x: float("inf"),
        lambda x: -x,
    ):
        first, *rest = case["goldens"]
        altered = {**first, "value": [change(float.fromhex(x)).hex() for x in first["value"]]}
        assert contradiction({**case, "goldens": [altered, *rest]}) is not None
    assert contradiction({**case, "goldens": [{**case["goldens"][0], "shape": [1, 1]}]}) is not None
    assert contradiction({**case, "goldens": case["goldens"] * 2}) is not None
