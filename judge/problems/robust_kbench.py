"""robust-kbench folders: ``func_forward.py`` (``forward_fn``, ``Model``, ``get_inputs``) and ``config_forward.json``.

The solution replaces ``forward_fn`` by ``forward_fn`` or ``forward`` of a Python file; a ``.cu`` file is compiled by
torch and needs a GPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes
from assay.judge.problems.running import executed, explaining, seeded
from assay.runtime.files import read_text
from assay.runtime.records import from_json, structured

ENTRY = Entry("forward_fn")
_LOADER = """from torch.utils.cpp_extension import load

forward_fn = load(name="solution_extension", sources=[__file__.replace("solution.py", "forward.cu")]).forward
"""


_MOST = 10_000  # combinations of sizes
_Configs = dict[str, list[dict[str, Any]] | None]


class _Taken(Exception):
    """Carries the arguments that the module passes to the replaced function."""


def reads(path: Path) -> bool:
    """Return whether a folder is a problem of this format."""
    return (path / "func_forward.py").is_file()


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
    where = path / "func_forward.py"
    source = read_text(where, ProblemError)
    namespace = executed(source, where)
    lacking = [name for name in ("forward_fn", "Model", "get_inputs") if not callable(namespace.get(name))]
    if lacking:
        raise ProblemError(f"{where}: expected forward_fn, Model and get_inputs, got no {', '.join(lacking)}")
    with explaining(where, "reading the parameters of its functions"):
        order = inspect.signature(namespace["forward_fn"])
        given = _given(path / "config_forward.json", namespace)
    changeable = tuple(name for name in given[0] if all(type(sizes.get(name)) is int for sizes in given))

    def make(sizes: Sizes, seed: int) -> Instance:
        with explaining(where, f"Model({dict(sizes)})"):
            module = seeded(lambda: namespace["Model"](**_of(namespace["Model"].__init__, sizes)), seed, source)

        def draw(seed: int) -> tuple[Any, ...]:
            with explaining(where, f"get_inputs({dict(sizes)})"):
                inputs = seeded(namespace["get_inputs"], seed, source, _of(namespace["get_inputs"], sizes))
                return _taken(module, inputs, order)

        return Instance(sizes, namespace["forward_fn"], draw)

    return Problem(path.name, "robust-kbench", path, source, given, changeable, make, ENTRY)


def _taken(module: torch.nn.Module, inputs: Any, order: inspect.Signature) -> tuple[Any, ...]:
    """Return the arguments with which the module calls its function, in the function's own order."""

    def function(*arguments: Any, **named: Any) -> Any:
        raise _Taken(arguments, named)

    try:
        module(*inputs, fn=function)
    except _Taken as taken:
        arguments, named = taken.args
        bound = order.bind(*arguments, **named)
        if bound.kwargs:  # an earlier parameter was left out
            bound.apply_defaults()
        return tuple(_plain(part) for part in (*bound.args, *bound.kwargs.values()))
    raise ProblemError("expected Model.forward to call fn(...), and it didn't")


def _plain(part: Any) -> Any:
    return part.detach().clone() if isinstance(part, torch.Tensor) else part


def _of(function: Any, sizes: Sizes) -> dict[str, Any]:
    """Return the sizes that a function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in sizes.items() if name in known}


def _given(path: Path, namespace: Mapping[str, Any]) -> tuple[Sizes, ...]:
    """Return every combination of the configuration's lists, the "single" ones first, with the functions' defaults."""
    content = from_json(read_text(path, ProblemError), str(path), ProblemError) if path.exists() else {}
    structured(content, dict[str, Any], f"{path}:", ProblemError)
    lists_of = structured(
        {name: part for name, part in content.items() if name.endswith("_configs")}, _Configs, f"{path}:", ProblemError
    )
    defaults: dict[str, Any] = {}
    for function in (namespace["Model"].__init__, namespace["get_inputs"]):
        parameters = inspect.signature(function).parameters.items()
        defaults |= {name: part.default for name, part in parameters if part.default is not inspect.Parameter.empty}
    results: list[Sizes] = []
    for kind in ("single", "multi"):
        lists = [lists_of.get(f"{kind}_{part}_configs") or [{}] for part in ("shared", "init", "input")]
        if math.prod(map(len, lists)) > _MOST:
            raise ProblemError(f"{path}: expected at most {_MOST:,} combinations of the {kind} lists, got more")
        for parts in product(*lists):
            sizes = {**defaults, **{name: value for part in parts for name, value in part.items()}}
            if sizes not in results and (kind == "single" or any(parts)):
                results.append(sizes)
    return tuple(results)


def solution(path: Path, of: Problem) -> Answer:
    """Return the solution: Python, or CUDA that torch compiles. Raises `ProblemError`."""
    file = next((path / name for name in ("forward.py", "forward.cu") if (path / name).is_file()), path)
    if not file.is_file():
        raise ProblemError(f"{file}: expected forward.py or forward.cu, got none")
    text = read_text(file, ProblemError)
    if file.suffix in (".cu", ".cpp"):
        return Answer(file.stem, {"solution.py": _LOADER, "forward.cu": text}, "solution.py", of.entry, "cuda")
    names = [name for name in ("forward_fn", "forward", "ModelNew") if f"def {name}" in text or f"class {name}" in text]
    if not names or names[0] == "ModelNew":
        raise ProblemError(f"{file}: expected a function forward_fn or forward, got none")
    return Answer(file.stem, {"solution.py": text}, "solution.py", Entry(names[0]))
