"""Which operations of PyTorch's OpInfo database numbers can be computed with, and which public references.

Run: ``python benchmarks/verify/coverage.py KERNELBENCH DEFINITIONS`` writes docs/coverage.md, KERNELBENCH being the
folder of that name in a copy of the public repository, DEFINITIONS a folder of FlashInfer Trace's; ``python
benchmarks/verify/coverage.py --only NAME...`` prints what becomes of some operations of PyTorch. Each deterministic
operation with float32 is called with a few of its samples: as a reference in float64 balls, whose radius must hold what
PyTorch gives in float64, and once more under the default contract, which must admit what PyTorch gives in float32.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import assay.golden.lowering  # noqa: F401  # the rules
from assay.formats.accumulator import accumulator_named
from assay.formats.format import format_named
from assay.golden.arithmetic import BallArithmetic, RoundingModel
from assay.golden.errors import MissingOperation, Undecided
from assay.golden.evaluation.golden import golden_of
from assay.golden.lowering.dispatch import Lowering
from assay.golden.lowering.tensor import TracedTensor, read
from assay.runtime.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.verify import flashinfer_definitions, kernelbench  # noqa: E402  # found by the path above

SAMPLES = 4
_SPECIAL = 2e-9
_OPEN = 0.01  # of the elements may be open
MODEL = RoundingModel(
    format_named("float32"), accumulator_named("float32"), ulps={"exp": 2, "log": 2, "rsqrt": 2, "div": 2}
)


def operations() -> Any:
    """PyTorch's database; of the package for snapshot tests, which its module imports, only a class is needed."""
    if "expecttest" not in sys.modules:
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def outcome(info: Any) -> str:
    """ "ok", or what went wrong with the first sample that did."""
    if "empty" in info.name:
        return "unwritten: memory that nobody wrote has no value"
    try:
        samples = []
        for sample in info.sample_inputs("cpu", torch.float32):
            samples.append(sample)
            if len(samples) == SAMPLES:
                break
    except Exception as error:
        return f"no samples: {type(error).__name__}"
    for sample in samples:
        given = (sample.input, *sample.args), sample.kwargs
        leaves, tree = tree_flatten(given)
        try:
            wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
            args, kwargs = tree_unflatten(
                [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in wide], tree
            )
            expected = info.op(*args, **kwargs)
            args, kwargs = tree_unflatten(
                [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves], tree
            )
            eager = info.op(*args, **kwargs)
        except Exception as error:
            return f"no float64: {type(error).__name__}"
        if any(isinstance(x, torch.Tensor) and x.is_complex() for x in (*tree_leaves(eager), *leaves)):
            return "complex"
        for xp, right in ((BallArithmetic(), expected), (BallArithmetic(MODEL), eager)):
            try:
                found = evaluated(info, wide if xp.model.certifies else leaves, tree, xp)
            except (MissingOperation, Undecided) as error:
                words = str(error).partition(" in evaluated: ")[2].partition("; to add one")[0]
                return f"{'random' if 'draws random' in str(error) else 'missing'}: {words}"
            except NotImplementedError as error:
                return f"missing: {str(error).splitlines()[0]}"
            except Exception as error:
                return f"error: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            words = compared(found, right)
            if words:
                return f"{'golden' if xp.model.certifies else 'tolerance'}: {words}"
    return "ok"


def evaluated(info: Any, leaves: list[Any], tree: Any, xp: Any) -> list[Any]:
    """The results of an operation on numbers."""
    ctx = Lowering(xp)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        numbers = [ctx.lift(x.detach().clone()) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(numbers, tree)
        with ctx:
            found = info.op(*args, **kwargs)
        return [read(x) if isinstance(x, TracedTensor) else x for x in tree_leaves(found)]
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def compared(found: list[Any], expected: Any) -> str:
    """Why a result isn't within its ball; nothing where all are."""
    others = tree_leaves(expected)
    if len(found) != len(others):
        return f"{len(found)} results, expected {len(others)}"
    for one, two in zip(found, others, strict=True):
        if not isinstance(two, torch.Tensor):
            if one != two:
                return f"{one}, expected {two}"
            continue
        golden = golden_of(one)
        if tuple(golden.value.shape) != tuple(two.shape):
            return f"shape {tuple(golden.value.shape)}, expected {tuple(two.shape)}"
        value, right = golden.value.double(), two.detach().double()
        off = (value - right).abs()
        inside = (off <= golden.radius * (1 + 1e-9) + 0.5001 * _ulp(two)) | (value == right)
        inside |= value.isnan() & right.isnan()
        unknown = golden.radius.isinf() & value.isfinite()
        if float(unknown.double().mean()) > _OPEN if unknown.numel() else False:
            return f"nothing is known of {int(unknown.sum())} of {unknown.numel()} elements"
        inside |= unknown
        if two.dtype == torch.float64:  # PyTorch's own special functions are off by that much
            inside |= off <= _SPECIAL * (1 + right.abs())
        if not bool(inside.all()):
            place = tuple(int(i) for i in (~inside).nonzero()[0])
            return (
                f"{int((~inside).sum())} of {inside.numel()} outside, e.g. {float(value[place]):.9g} "
                f"± {float(golden.radius[place]):.2g}, PyTorch {float(right[place]):.9g}"
            )
    return ""


def _ulp(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return torch.zeros(x.shape, dtype=torch.float64)
    value = x.detach().abs()
    return (torch.nextafter(value, torch.full_like(value, torch.inf)) - value).double().nan_to_num(0.0)


def outcomes(names: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Each operation, or those of these names, and its `outcome`."""
    for info in operations():
        label = f"{info.name}{'.' + info.variant_test_name if info.variant_test_name else ''}"
        if (not names or label in names or info.name in names) and torch.float32 in info.dtypes:
            yield label, outcome(info)


def page(problems: Path, definitions: Path) -> Iterator[str]:
    """The lines of docs/coverage.md."""
    found = dict(outcomes())
    counts = Counter(words.partition(":")[0] for words in found.values())
    left_out = sum(counts[kind] for kind in ("random", "complex", "unwritten", "no float64", "no samples"))
    asked = len(found) - left_out
    yield from (
        "# What references may be made of",
        "",
        "Written by `python benchmarks/verify/coverage.py KERNELBENCH DEFINITIONS` with PyTorch "
        f"{torch.__version__} on {date.today()}.",
        "",
        "## PyTorch's OpInfo database",
        "",
        f"Of {asked} deterministic operations on real numbers {counts['ok']} ({counts['ok'] / asked:.1%}) are computed "
        f"with: on up to {SAMPLES} of the database's samples the golden holds what PyTorch gives in float64 (to "
        f"{_SPECIAL:g}, which its own special functions are off), and the default contract's tolerance what it gives "
        f"in float32. Left out are {left_out} that draw random numbers, are complex, or have no samples in float64.",
        "The others:",
        "",
        *(f"- `{label}`: {words[:160]}" for label, words in found.items() if words.partition(":")[0] in _LACKING),
        "",
        "## KernelBench's references",
        "",
        *kernelbench.section(problems, MODEL),
        "",
        "## FlashInfer Trace's definitions",
        "",
        *flashinfer_definitions.section(definitions, MODEL),
    )


_LACKING = ("missing", "golden", "tolerance", "error")


def main(arguments: list[str]) -> None:
    """Write the page, or print what becomes of single operations."""
    warnings.simplefilter("ignore")
    if arguments[:1] == ["--only"]:
        for label, words in outcomes(arguments[1:]):
            print(f"{label}: {words}", flush=True)
    elif len(arguments) == 2 and Path(arguments[0], "level1").is_dir() and Path(arguments[1]).is_dir():
        write_text_atomically(ROOT / "docs" / "coverage.md", "\n".join(page(*map(Path, arguments))) + "\n")
    else:
        sys.exit(
            "coverage: expected the folder KernelBench of a copy of that repository and a folder of definitions of "
            "FlashInfer Trace, or --only NAME..."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
