"""Writes the frozen vectors: ``python -m tests.golden.vectors.freeze``, in the root of the repository.

What is frozen already under the same version stays as it is, so that running this never hides a change.
"""

import hashlib
import json
import math
from functools import cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch

from assay.golden.inputs import values
from assay.golden.inputs.distributions import names_of
from assay.golden.inputs.recipe import Recipe, recipe
from assay.golden.inputs.values import draw
from assay.golden.options import Option
from assay.golden.registry import Spec, spec, specs
from assay.golden.signature import parse
from assay.golden.store import Record, make_record
from assay.runtime.errors import AssayError
from assay.verify.cases.case import Case
from assay.verify.cases.sampler import Sampler, seeded

INPUTS = Path(__file__).with_name("inputs.json")
DEFINITIONS = Path(__file__).with_name("definitions.json")

CASES = 4
ELEMENTS = 12
WORDS = ("tanh", "bottom_right", "top_left", "row", "block", "group128", "awq", "gptq", "sigmoid", "sum", "none")
SIZES = {"A": 5, "B": 67, "C": 3, "E": 8, "n": 3, "m": 16, "T": 140, "V": 11}
SEEDS = (0, 1, 2**40 + 3)
ANY_SHAPE = ("", "B", "A,B", "C,A,B")
FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")

# Role, as signatures have it: dimensions that its tensors may have, and dtypes.
DRAWN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "real": (ANY_SHAPE, (*FLOATS, "int8")),
    "real(448)": (("A,B",), ("float32", "bfloat16")),
    "real(127)": (("A,B",), ("float32", "bfloat16")),
    "real(15)": (("A,B",), ("float32", "bfloat16")),
    "scale": (ANY_SHAPE, ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")),
    "weight": (ANY_SHAPE, ("float32", "bfloat16")),
    "angle": (ANY_SHAPE, ("float32", "bfloat16")),
    "slope": (ANY_SHAPE, ("float32", "bfloat16")),
    "lse": (ANY_SHAPE, ("float32", "bfloat16")),
    "code(16)": (("A,B",), ("uint8",)),
    "index(E)": (("A,B",), ("int32", "int64")),
    "length(n*m)": (("B",), ("int32",)),
    "offsets(T)": (("A",), ("int32",)),
    "pair(4)": (("A,2*C",), ("uint8",)),
    "label(V,-100)": (("B",), ("int64",)),
    "bits": (("A,B",), ("uint8", "int32")),
}


def kinds(role: str) -> tuple[str, ...]:
    """The distributions of a role; of numbers that are going to be codes those that others don't have."""
    names = names_of(parse(f"x[]={role}").tensors[0])
    return names if role == "real" or not role.startswith("real") else tuple(set(names) - set(kinds("real")))


def drawn(role: str, kind: str, dtype: str, seed: int) -> list[torch.Tensor]:
    """One tensor for each of the role's shapes."""
    shapes = DRAWN[role][0]
    return [draw(parse(f"x[{dims}]={role}").tensors[0], SIZES, dtype, kind, seed) for dims in shapes]


def digest(role: str, kind: str, dtype: str) -> str:
    """SHA-256 over the bytes of the tensors of all shapes and seeds."""
    found = hashlib.sha256()
    for tensor in chain.from_iterable(drawn(role, kind, dtype, seed) for seed in SEEDS):
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def spelled() -> dict[str, Any]:
    """The first numbers of some distributions of a 2 x 4 tensor ``x``, seed 7; floats in hexadecimal."""
    sizes = {"R": 2, "N": 4}
    chosen = {
        kind: [number.hex() for number in _drawn("x[R,N]", sizes, "float64", kind)]
        for kind in ("normal", "lognormal", "outliers", "cancelling", "near_overflow", "subnormal")
    }
    chosen["bfloat16 normal"] = [number.hex() for number in _drawn("x[R,N]", sizes, "bfloat16", "normal")]
    return chosen | {
        "code uniform": _drawn("x[R,N]=code(16)", sizes, "uint8", "uniform"),
        "length mixed": _drawn("x[N]=length(R*N)", sizes, "int32", "mixed"),
    }


def _drawn(text: str, sizes: dict[str, int], dtype: str, kind: str) -> Any:
    found = draw(parse(text).tensors[0], sizes, dtype, kind, 7).reshape(-1)
    return found.double().tolist() if found.is_floating_point() else found.tolist()


def cases(definition: Spec) -> list[Recipe]:
    """Small calls of a spec under varied options, of all that were drawn those with about `ELEMENTS` results."""
    options = {name: _candidates(option) for name, option in definition.options.items()}
    sampler = Sampler(definition, "float32", options, layouts=("contiguous",))
    drawn = [sampler.case(seeded(seed), style="small") for seed in range(300)]
    made: list[Recipe] = []
    for case in sorted(drawn, key=_distance):
        try:
            each = recipe(case.spec, case.sizes, case.dtypes, options=case.options, seed=case.seed)
            if all(math.isfinite(float.fromhex(golden["radius"])) for golden in evaluated(each)):
                made.append(each)
        except AssayError:  # options that exclude each other
            continue
        if len(made) == CASES:
            break
    return made


def _distance(case: Case) -> int:
    results = [prod(tensor.shape(case.sizes)) for tensor in case.signature.returns]
    return abs(sum(results) - ELEMENTS) if min(results) else 10**9


def _candidates(option: Option) -> list[Any]:
    tried = (option.default, False, True, 0.5, 30.0, 2, (1, 0), *WORDS)
    return [value for place, value in enumerate(tried) if option.accepts(value) and value not in tried[:place]]


@cache
def record_of(text: str) -> Record:
    """The record of a recipe in JSON, evaluated once for all tests."""
    return make_record(Recipe.from_json(text))


def evaluated(made: Recipe) -> list[dict[str, Any]]:
    """The goldens of a recipe: shape, values in hexadecimal, and the largest radius."""
    return [
        {
            "shape": list(golden.value.shape),
            "value": [number.hex() for number in golden.value.double().reshape(-1).tolist()],
            "radius": float(golden.radius.max()).hex(),
        }
        for golden in record_of(made.to_json()).goldens
    ]


def contradiction(case: dict[str, Any]) -> str | None:
    """What in a frozen case no longer agrees with its spec: numbers further apart than both radii allow."""
    now = evaluated(Recipe.from_json(json.dumps(case["recipe"])))
    if [golden["shape"] for golden in now] != [golden["shape"] for golden in case["goldens"]]:
        return f"other shapes: {case['recipe']}"
    for mine, theirs in zip(now, case["goldens"], strict=True):
        allowed = float.fromhex(mine["radius"]) + float.fromhex(theirs["radius"])
        for x, y in zip(map(float.fromhex, mine["value"]), map(float.fromhex, theirs["value"]), strict=True):
            same = x == y or (math.isnan(x) and math.isnan(y))
            if not same and not (math.isfinite(x) and math.isfinite(y) and abs(x - y) <= allowed):
                return f"{x} and {y} are further apart than {allowed}: {case['recipe']}"
    return None


def main() -> None:
    """Add what is not frozen yet."""
    inputs = json.loads(INPUTS.read_text(encoding="utf-8")) if INPUTS.exists() else {"version": 0}
    if inputs["version"] != values.VERSION:
        inputs = {"version": values.VERSION, "digests": {}, "spelled": spelled()}
    for role, (_, dtypes) in DRAWN.items():
        for name in (f"{role}/{kind}/{dtype}" for kind in kinds(role) for dtype in dtypes):
            if name not in inputs["digests"]:
                inputs["digests"][name] = digest(*name.split("/"))
    INPUTS.write_text(json.dumps(inputs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    frozen = json.loads(DEFINITIONS.read_text(encoding="utf-8")) if DEFINITIONS.exists() else {}
    for definition in map(spec, specs()):
        if frozen.get(definition.name, {}).get("version") != definition.version:
            made = [{"recipe": json.loads(each.to_json()), "goldens": evaluated(each)} for each in cases(definition)]
            frozen[definition.name] = {"version": definition.version, "cases": made}
            print(f"{definition.name}: {len(made)} cases")
    lines = [f"{json.dumps(name)}: {json.dumps(frozen[name], separators=(',', ':'))}" for name in sorted(frozen)]
    DEFINITIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
