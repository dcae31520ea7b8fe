"""FlashInfer Trace: ``definition.json``, ``workload.jsonl`` and ``solution.json``, with SOL-ExecBench's additions.

Axes are constant, variable, or an expression over others; workloads state the variable ones, which alone may change,
as far as the constraints allow. Inputs are random, scalars, tensors of a safetensors file, or made by the definition's
own function (``custom_inputs_entrypoint``).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import msgspec
import torch

from assay.judge.problems.expressions import names_in, value_of
from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes, Style
from assay.judge.problems.running import executed, explaining, seeded
from assay.runtime.files import read_text
from assay.runtime.records import from_json, structured
from assay.runtime.source import syntax_tree

_USUAL = 16  # size of a variable axis without workloads
_NEAREST: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Eq: lambda size, bound: bound,
    ast.Gt: lambda size, bound: max(size, bound + 1),
    ast.GtE: max,
    ast.Lt: lambda size, bound: min(size, bound - 1),
    ast.LtE: min,
}
_LAST = re.compile(r"(\w+)\s*==\s*(\w+)\[-1\](?:\.item\(\))?")


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Axis(msgspec.Struct, frozen=True):
    """An axis: its size is constant, or stated by each workload, or an expression over other axes."""

    type: Literal["const", "var", "expr"] = "var"
    value: _Size | None = None
    expression: str = ""


class Tensor(msgspec.Struct, frozen=True):
    """An input or output; ``shape`` is None for a scalar."""

    shape: list[str | int] | None
    dtype: str


class Definition(msgspec.Struct, frozen=True):
    """What ``definition.json`` says. Its other keys have no effect here."""

    name: str
    axes: dict[str, Axis]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    reference: str
    constraints: list[str] | None = None
    custom_inputs_entrypoint: str | None = None


class _Stated(msgspec.Struct, frozen=True):
    """What a workload states of an input."""

    type: Literal["random", "scalar", "custom", "safetensors"] = "random"
    value: bool | int | float | str | None = None
    path: str = ""
    tensor_key: str = ""


class _Workload(msgspec.Struct, frozen=True):
    axes: dict[str, _Size] = {}
    inputs: dict[str, _Stated] = {}
    uuid: str | int = ""


class _Source(msgspec.Struct, frozen=True):
    path: str
    content: str


class _Call(msgspec.Struct, frozen=True):
    """The ``spec`` of a solution: which function of which file is called, and how."""

    entry_point: str
    language: str = "python"
    languages: list[str] | None = None
    destination_passing_style: bool | None = True


class _Solution(msgspec.Struct, frozen=True):
    spec: _Call
    sources: list[_Source]
    name: str | None = None
    definition: str | None = None


@dataclass(frozen=True)
class Axes:
    """``constant`` sizes, the names of ``variable`` ones, ``expressions`` for the rest.

    ``constraints`` are those between axes alone; ``last`` says which axis a tensor's last element is
    (``total_q == indptr[-1].item()``).
    """

    constant: Mapping[str, int]
    variable: tuple[str, ...]
    expressions: Mapping[str, str]
    constraints: tuple[str, ...]
    last: Mapping[str, str]
    where: Path

    @staticmethod
    def of(content: Definition, where: Path) -> Axes:
        """Return the axes of a definition."""
        constant: dict[str, int] = {}
        variable, expressions = [], {}
        for name, axis in content.axes.items():
            if axis.type == "const" and axis.value is not None:
                constant[name] = axis.value
            elif axis.type == "expr":
                expressions[name] = axis.expression
            else:
                variable.append(name)
        known = {*constant, *variable, *expressions}
        between, last = [], {}
        for constraint in content.constraints or ():
            match = _LAST.fullmatch(constraint.strip())
            if match is not None and match[1] in known:
                last[match[2]] = match[1]
            elif names_in(constraint) <= known:
                between.append(constraint)
        return Axes(constant, tuple(variable), expressions, tuple(between), last, where)

    @property
    def all(self) -> set[str]:
        """Return the names of all axes."""
        return {*self.constant, *self.variable, *self.expressions}

    def resolved(self, sizes: Sizes) -> dict[str, int]:
        """Return the size of every axis. Raises `ProblemError` if one is missing."""
        results = {**self.constant, **{name: int(sizes[name]) for name in self.variable if name in sizes}}
        open_ = dict(self.expressions)
        while open_:
            ready = [name for name, text in open_.items() if names_in(text) <= results.keys()]
            if not ready:
                raise ProblemError(f"{self.where}: axes: {', '.join(open_)} can't be evaluated")
            for name in ready:
                results[name] = int(value_of(open_.pop(name), results))
        missing = [name for name in self.variable if name not in results]
        if missing:
            raise ProblemError(f"{self.where}: a workload states no size of {', '.join(missing)}")
        return results

    def length(self, name: Any, sizes: Mapping[str, int]) -> int:
        """Return the size of a dimension: an axis, an expression over axes, or a number."""
        return sizes[name] if name in sizes else int(value_of(str(name), sizes))

    def allows(self, sizes: Sizes) -> bool:
        """Return whether the constraints between axes hold."""
        try:
            result = self.resolved(sizes)
            return all(bool(value_of(text, result)) for text in self.constraints)
        except ProblemError:
            return False

    def usual(self) -> Sizes:
        """Return sizes for a definition without workloads: equal, unless constraints demand others."""
        sizes = dict.fromkeys(self.variable, _USUAL)
        for text in self.constraints:
            match syntax_tree(text, "eval").body:
                case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[right]) if name in sizes:
                    bound = int(value_of(ast.unparse(right), {**self.constant, **sizes}))
                    sizes[name] = _NEAREST[type(op)](sizes[name], bound) if type(op) in _NEAREST else sizes[name]
        return sizes


_INDICES = ("id", "ids", "idx", "idxs", "topk")
_FEW = 1024  # bound of random integers of either sign


def drawn(
    content: Definition,
    sizes: Sizes,
    axes: Mapping[str, int],
    namespace: Mapping[str, Any],
    root: Path,
) -> tuple[Any, ...]:
    """Return the arguments of a definition in its order, drawn from the global random generators.

    Tensors of a file are used only at the workload's own sizes. Raises `ProblemError`.
    """
    stated: Mapping[str, _Stated] = msgspec.convert(sizes.get("@inputs", {}), dict[str, _Stated])
    scalars = {name: part.value for name, part in stated.items() if part.type == "scalar"}
    made: Mapping[str, Any] = {}
    function = content.custom_inputs_entrypoint
    if function and any(part.type == "custom" for part in stated.values()):
        made = namespace[function]({**axes, **scalars}, torch.device("cpu"))
    results: list[Any] = []
    for name, part in content.inputs.items():
        how = stated.get(name, _Stated()).type
        shape = None if part.shape is None else tuple(_length(axis, axes) for axis in part.shape)
        dtype = dtype_of(part.dtype, Path(content.name))
        if how == "scalar":
            results.append(scalars[name])
        elif how == "custom":
            if name not in made:
                raise ProblemError(f"{function} makes no {name}, which the workload takes from it")
            results.append(made[name])
        elif how == "safetensors" and (value := _of_file(stated[name], root, shape)) is not None:
            results.append(value.to(dtype))
        else:
            results.append(_random(name, shape, dtype, axes, content))
    return tuple(results)


def _length(axis: Any, axes: Mapping[str, int]) -> int:
    return axes[axis] if axis in axes else int(value_of(str(axis), axes))


def _of_file(stated: _Stated, root: Path, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """Return a tensor of a safetensors file, or None if the file is missing or its shape differs."""
    from safetensors.torch import load_file

    path = root / stated.path
    if not os.path.isfile(path):
        return None
    value = load_file(path)[stated.tensor_key]
    return value if tuple(value.shape) == shape else None


def _random(name: str, shape: Any, dtype: torch.dtype, axes: Mapping[str, int], content: Definition) -> Any:
    """Return random numbers; integers are offsets, indices or lengths if their name says so."""
    if shape is None:
        return 1e-6 if name.startswith("eps") else float(torch.rand(())) + 0.5 if dtype.is_floating_point else 1
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point:
        if "probs" in name:
            return torch.rand(shape).softmax(-1).to(dtype)
        values = torch.randn(shape)
        values = values.clamp(-2, 2) if dtype.itemsize == 1 else values
        return values.abs().to(dtype) if "scale" in name else values.to(dtype)
    return _integers(name, shape, axes, content).to(dtype)


def _integers(name: str, shape: tuple[int, ...], axes: Mapping[str, int], content: Definition) -> torch.Tensor:
    last = {**_last(content)}
    if name in last or name.endswith("indptr") or "cu_seqlens" in name:
        total = axes.get(last.get(name, ""), 4 * (shape[0] - 1))
        cuts = torch.randint(0, total + 1, (max(shape[0] - 2, 0),)).sort().values
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), cuts, torch.full((1,), total)])
        return ends[-shape[0] :]
    words = name.lower().split("_")
    if any(word in _INDICES or word.startswith(("ind", "page")) for word in words) or "block_table" in name:
        bounds = [size for axis, size in axes.items() if "page" in axis or "expert" in axis or "vocab" in axis]
        return torch.randint(0, max(min(bounds, default=2), 1), shape)
    if any(word.startswith(("len", "seqlen", "seqlens")) for word in words):
        return torch.randint(1, 9, shape)
    return torch.randint(-_FEW, _FEW, shape)


def _last(content: Definition) -> dict[str, str]:
    """Return the axis that a tensor's last element gives, by tensor."""
    return dict(Axes.of(content, Path(content.name)).last)


_LONGEST, _LONGEST_PART = 1000, 255  # bytes of a source's path, and of each part of it
_LANGUAGES = ("python", "triton", "pytorch")


def reads(path: Path) -> bool:
    """Return whether a folder has a problem of this format; a JSON file must be one."""
    return any(is_definition(file) for file in path.glob("*.json")) if path.is_dir() else path.suffix == ".json"


def is_definition(path: Path) -> bool:
    """Return whether a file is a definition."""
    try:
        content = _json(path)
    except ProblemError:
        return False
    return isinstance(content, dict) and {"axes", "inputs", "outputs", "reference"} <= content.keys()


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
    file = path if path.is_file() else next(file for file in sorted(path.glob("*.json")) if is_definition(file))
    content: Definition = structured(_json(file), Definition, f"{file}:", ProblemError)
    axes = Axes.of(content, file)
    source = content.reference
    namespace = executed(source, file)
    run = _run(source, namespace)
    if run is None:
        raise ProblemError(f"{file}: reference: expected a function run, got none")
    given = tuple(_sizes(workload, axes) for workload in workloads(file, content.name)) or (axes.usual(),)
    results = content.outputs

    def make(sizes: Sizes, seed: int) -> Instance:
        result = axes.resolved(sizes)

        def draw(seed: int) -> tuple[Any, ...]:
            with explaining(file, f"inputs at {result}"):
                return seeded(lambda: drawn(content, sizes, result, namespace, root_of(file)), seed, source)

        made = tuple((name, _shape(axes, part, result), dtype_of(part.dtype, file)) for name, part in results.items())
        return Instance(sizes, _by_position(run, tuple(results)), draw, results=made)

    entry = Entry("run", "function", "destination")
    return Problem(
        content.name,
        "FlashInfer Trace",
        file,
        source,
        given,
        axes.variable,
        make,
        entry,
        names=tuple(content.inputs),
        wanted=axes.allows,
    )


def _run(source: str, namespace: Mapping[str, Any]) -> Any:
    """Return the function ``run`` of a reference, or its last function (FlashInfer's own dumps have no ``run``)."""
    names = ["run", *(node.name for node in reversed(syntax_tree(source).body) if isinstance(node, ast.FunctionDef))]
    return next((namespace[name] for name in names if callable(namespace.get(name))), None)


def _by_position(run: Any, names: tuple[str, ...]) -> Any:
    """Return the reference with results in the definition's order, also if it returns a dict."""

    def reference(*arguments: Any) -> Any:
        result = run(*arguments)
        return tuple(result[name] for name in names) if isinstance(result, dict) else result

    return reference


def _shape(axes: Axes, part: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes.length(name, sizes) for name in part.shape or ())


def dtype_of(name: str, where: Path) -> torch.dtype:
    """Return the torch dtype of a definition's name. Raises `ProblemError`."""
    result = getattr(torch, name, None)
    if not isinstance(result, torch.dtype):
        raise ProblemError(f"{where}: torch has no dtype {name!r}")
    return result


def root_of(file: Path) -> Path:
    """Return the folder that safetensors paths are relative to: the one with ``definitions``, or the file's own."""
    return next((up.parent for up in file.parents if up.name == "definitions"), file.parent)


def workloads(file: Path, name: str) -> list[dict[str, Any]]:
    """Return the workloads of a definition, from its folder or that of the data set. Raises `ProblemError`."""
    root = root_of(file)
    indices = [file.parent / "workload.jsonl", file.parent / f"{name}.jsonl", *root.glob(f"workloads/**/{name}.jsonl")]
    results = []
    for index in dict.fromkeys(index for index in indices if os.path.exists(index)):
        for number, line in enumerate(read_text(index, ProblemError).split("\n"), 1):
            if line.strip():
                content = from_json(line, f"{index}:{number}", ProblemError)
                workload = content.get("workload", content) if isinstance(content, dict) else content
                structured(workload, _Workload, f"{index}:{number}:", ProblemError)
                results.append(workload)
    return results


def _sizes(workload: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    """Return a workload's sizes, and its inputs and id under names that no axis has."""
    sizes: dict[str, Any] = {name: int(value) for name, value in workload.get("axes", {}).items() if name in axes.all}
    return {**sizes, "@inputs": workload.get("inputs", {}), "@uuid": workload.get("uuid", "")}


def solution(path: Path, of: Problem) -> Answer:
    """Return a solution of the definition: solution.json, or the first in a folder. Raises `ProblemError`."""
    file = path if path.is_file() else next(_solutions(path, of.name), path / "solution.json")
    if not os.path.exists(file):
        raise ProblemError(f"{file}: expected a solution of {of.name}, got none")
    content: _Solution = structured(_json(file), _Solution, f"{file}:", ProblemError)
    if content.definition not in (None, of.name):
        raise ProblemError(f"{file}: expected a solution of {of.name}, got one of {content.definition}")
    files = {part.path: part.content for part in content.sources}
    if (wrong := _misplaced(files)) is not None:
        raise ProblemError(f"{file}: sources: expected paths of files within the solution's folder, got {wrong!r:.80}")
    main, _, name = content.spec.entry_point.partition("::")
    if main not in files:
        raise ProblemError(f"{file}: entry_point: expected one of {', '.join(files)}, got {main!r}")
    languages = content.spec.languages or [content.spec.language]
    language = next((name for name in languages if name not in _LANGUAGES), languages[0])
    style: Style = "destination" if content.spec.destination_passing_style else "arguments"
    return Answer(content.name or file.stem, files, main, Entry(name or "run", "function", style), language)


def _misplaced(names: Iterable[str]) -> str | None:
    """Return the first name that no file in a folder can have beside the others, or None."""
    paths = {PurePosixPath(name) for name in names}
    for name in names:
        path = PurePosixPath(name)
        is_outside = path.is_absolute() or ".." in path.parts
        is_too_long = len(name.encode()) > _LONGEST or any(len(part.encode()) > _LONGEST_PART for part in path.parts)
        if not path.parts or "\0" in name or is_outside or is_too_long or not paths.isdisjoint(path.parents):
            return name
    return None


def _json(file: Path) -> Any:
    """Return the content of a JSON file. Raises `ProblemError`."""
    return from_json(read_text(file, ProblemError), str(file), ProblemError)


def _solutions(folder: Path, name: str) -> Iterator[Path]:
    for file in [folder / "solution.json", *sorted(folder.glob("**/*.json"))]:
        try:
            content = _json(file)
        except ProblemError:
            continue
        if isinstance(content, dict) and "sources" in content and content.get("definition") in (None, name):
            yield file
