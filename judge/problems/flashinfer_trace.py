"""FlashInfer Trace: ``definition.json``, ``workload.jsonl`` and ``solution.json``, with SOL-ExecBench's additions.

Axes are constant, variable, or an expression over others; workloads state the variable ones, which alone may change,
as far as the constraints allow. Inputs are random, scalars, tensors of a safetensors file, or made by the definition's
own function (``custom_inputs_entrypoint``).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.axes import Axes
from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes, Style
from assay.judge.problems.running import executed, explained, seeded
from assay.judge.problems.workload_inputs import drawn

_LANGUAGES = ("python", "triton", "pytorch")


def reads(path: Path) -> bool:
    """Whether a folder, or a definition's file, is a problem of this format."""
    if path.is_dir():
        return any(is_definition(file) for file in path.glob("*.json"))
    return path.suffix == ".json" and is_definition(path)


def is_definition(path: Path) -> bool:
    """Whether a file is a definition."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"axes", "inputs", "outputs", "reference"} <= content.keys()


def problem(path: Path) -> Problem:
    """The problem. Raises `ProblemError`."""
    file = path if path.is_file() else next(file for file in sorted(path.glob("*.json")) if is_definition(file))
    content = json.loads(file.read_text(encoding="utf-8"))
    axes = Axes.of(content, file)
    source: str = content["reference"]
    namespace = executed(source, file)
    run = _run(source, namespace)
    if run is None:
        raise ProblemError(f"{file}: reference: expected a function run, got none")
    given = tuple(_sizes(workload, axes) for workload in workloads(file, content["name"])) or (axes.usual(),)
    results = content["outputs"]

    def make(sizes: Sizes, seed: int) -> Instance:
        result = axes.resolved(sizes)

        def draw(seed: int) -> tuple[Any, ...]:
            try:
                return seeded(lambda: drawn(content, sizes, result, namespace, root_of(file)), seed, source)
            except ProblemError:
                raise
            except Exception as error:
                raise explained(error, file, f"inputs at {result}") from None

        made = tuple(
            (name, _shape(axes, part, result), dtype_of(part["dtype"], file)) for name, part in results.items()
        )
        return Instance(sizes, _by_position(run, tuple(results)), draw, results=made)

    entry = Entry("run", "function", "destination")
    return Problem(
        content["name"],
        "FlashInfer Trace",
        file,
        source,
        given,
        axes.variable,
        make,
        entry,
        names=tuple(content["inputs"]),
        wanted=axes.allows,
    )


def _run(source: str, namespace: Mapping[str, Any]) -> Any:
    """The function ``run`` of a reference; of one without it, as FlashInfer's own dumps are, its last function."""
    names = ["run", *(node.name for node in reversed(ast.parse(source).body) if isinstance(node, ast.FunctionDef))]
    return next((namespace[name] for name in names if callable(namespace.get(name))), None)


def _by_position(run: Any, names: tuple[str, ...]) -> Any:
    """The reference, whose results by name come in the definition's order."""

    def reference(*arguments: Any) -> Any:
        result = run(*arguments)
        return tuple(result[name] for name in names) if isinstance(result, dict) else result

    return reference


def _shape(axes: Axes, part: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes.length(name, sizes) for name in part["shape"] or ())


def dtype_of(name: str, where: Path) -> torch.dtype:
    """The torch dtype of a definition's."""
    result = getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise ProblemError(f"{where}: torch has no dtype {name!r}")
    return result


def root_of(file: Path) -> Path:
    """The folder that paths of safetensors are relative to: that with ``definitions``, or the definition's own."""
    return next((up.parent for up in file.parents if up.name == "definitions"), file.parent)


def workloads(file: Path, name: str) -> list[dict[str, Any]]:
    """The workloads of a definition: beside it, or in the folder of a whole data set. Raises `ProblemError`."""
    root = root_of(file)
    indices = [file.parent / "workload.jsonl", file.parent / f"{name}.jsonl", *root.glob(f"workloads/**/{name}.jsonl")]
    results = []
    for index in dict.fromkeys(index for index in indices if index.is_file()):
        for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except ValueError as error:
                raise ProblemError(f"{index}:{number}: expected JSON, got {error}") from None
            results.append(content.get("workload", content))
    return results


def _sizes(workload: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """A workload's sizes, and all else that it states, under names that no axis has."""
    sizes: dict[str, Any] = {name: int(value) for name, value in workload.get("axes", {}).items() if name in axes.all}
    return {**sizes, "@inputs": workload.get("inputs", {}), "@uuid": workload.get("uuid", "")}


def solution(path: Path, of: Problem) -> Answer:
    """A solution of the definition: solution.json, or of a folder the first. Raises `ProblemError`."""
    file = path if path.is_file() else next(_solutions(path, of.name), path / "solution.json")
    if not file.is_file():
        raise ProblemError(f"{file}: expected a solution of {of.name}, got none")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        spec, sources = content["spec"], content["sources"]
        main, _, name = spec["entry_point"].partition("::")
    except (ValueError, KeyError, TypeError) as error:
        raise ProblemError(
            f"{file}: expected a solution (spec, sources), got {type(error).__name__}: {error}"
        ) from None
    if content.get("definition") not in (None, of.name):
        raise ProblemError(f"{file}: expected a solution of {of.name}, got one of {content['definition']}")
    files = {part["path"]: part["content"] for part in sources}
    if any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ProblemError(f"{file}: sources: expected paths within the solution's folder")
    if main not in files:
        raise ProblemError(f"{file}: entry_point: expected one of {', '.join(files)}, got {main!r}")
    languages = spec.get("languages") or [spec.get("language", "python")]
    language = next((name for name in languages if name not in _LANGUAGES), languages[0])
    style: Style = "destination" if spec.get("destination_passing_style", True) else "arguments"
    return Answer(content.get("name", file.stem), files, main, Entry(name or "run", "function", style), language)


def _solutions(folder: Path, name: str) -> Iterator[Path]:
    for file in [folder / "solution.json", *sorted(folder.glob("**/*.json"))]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and "sources" in content and content.get("definition") in (None, name):
            yield file
