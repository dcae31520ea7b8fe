"""FlashInfer Trace: ``definition.json``, ``workload.jsonl`` and ``solution.json``, with SOL-ExecBench's additions.

Axes are constant, variable, or an expression over others; workloads state the variable ones, which alone may change,
as far as the constraints allow. Inputs are random, scalars, tensors of a safetensors file, or made by the definition's
own function (``custom_inputs_entrypoint``).
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.judge.problems.problem import Answer, Entry, Instance, Problem, ProblemError, Sizes, Style
from assay.judge.problems.running import executed, explained, seeded

_USUAL = 16  # size of a variable axis without workloads
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a // b if a % b == 0 else a / b,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_NEAREST: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Eq: lambda size, bound: bound,
    ast.Gt: lambda size, bound: max(size, bound + 1),
    ast.GtE: max,
    ast.Lt: lambda size, bound: min(size, bound - 1),
    ast.LtE: min,
}
_LAST = re.compile(r"(\w+)\s*==\s*(\w+)\[-1\](?:\.item\(\))?")


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
    def of(content: Mapping[str, Any], where: Path) -> Axes:
        """Return the axes of a definition. Raises `ProblemError`."""
        constant: dict[str, int] = {}
        variable, expressions = [], {}
        for name, axis in content["axes"].items():
            match axis.get("type", "var"):
                case "const" if "value" in axis:
                    constant[name] = int(axis["value"])
                case "var" | "const":
                    variable.append(name)
                case "expr":
                    expressions[name] = str(axis["expression"])
                case other:
                    raise ProblemError(f"{where}: axes.{name}: expected const, var or expr, got {other!r}")
        known = {*constant, *variable, *expressions}
        between, last = [], {}
        for constraint in content.get("constraints") or ():
            match = _LAST.fullmatch(constraint.strip())
            if match is not None and match[1] in known:
                last[match[2]] = match[1]
            elif _names(constraint) <= known:
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
            ready = [name for name, text in open_.items() if _names(text) <= results.keys()]
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
        except (ProblemError, ZeroDivisionError):
            return False

    def usual(self) -> Sizes:
        """Return sizes for a definition without workloads: equal, unless constraints demand others."""
        sizes = dict.fromkeys(self.variable, _USUAL)
        for text in self.constraints:
            tree = ast.parse(text, mode="eval").body
            match tree:
                case ast.Compare(left=ast.Name(id=name), ops=[op], comparators=[right]) if name in sizes:
                    bound = int(value_of(ast.unparse(right), {**self.constant, **sizes}))
                    sizes[name] = _NEAREST[type(op)](sizes[name], bound) if type(op) in _NEAREST else sizes[name]
        return sizes


def value_of(expression: str, names: Mapping[str, int]) -> Any:
    """Evaluate an expression of numbers, names and the usual operators. Raises `ProblemError` on any other."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(operand))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(value(part) for part in parts)
            case ast.BoolOp(values=parts):
                return any(value(part) for part in parts)
        raise ProblemError(f"expected an expression over {', '.join(sorted(names))}, got {expression!r}")

    return value(ast.parse(expression, mode="eval"))


def _names(expression: str) -> set[str]:
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError:
        return {"?"}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


_INDICES = ("id", "ids", "idx", "idxs", "topk")
_FEW = 1024  # bound of random integers of either sign


def drawn(
    content: Mapping[str, Any],
    sizes: Sizes,
    axes: Mapping[str, int],
    namespace: Mapping[str, Any],
    root: Path,
) -> tuple[Any, ...]:
    """Return the arguments of a definition in its order, drawn from the global random generators.

    Tensors of a file are used only at the workload's own sizes. Raises `ProblemError`.
    """
    stated: Mapping[str, Any] = sizes.get("@inputs", {})
    scalars = {name: part["value"] for name, part in stated.items() if part.get("type") == "scalar"}
    made: Mapping[str, Any] = {}
    function = content.get("custom_inputs_entrypoint")
    if function and any(part.get("type") == "custom" for part in stated.values()):
        made = namespace[function]({**axes, **scalars}, torch.device("cpu"))
    results = []
    for name, part in content["inputs"].items():
        how = stated.get(name, {}).get("type", "random")
        shape = None if part["shape"] is None else tuple(_length(axis, axes) for axis in part["shape"])
        dtype = getattr(torch, part["dtype"])
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


def _of_file(stated: Mapping[str, Any], root: Path, shape: tuple[int, ...] | None) -> torch.Tensor | None:
    """Return a tensor of a safetensors file, or None if the file is missing or its shape differs."""
    from safetensors.torch import load_file

    path = root / stated["path"]
    if not path.is_file():
        return None
    value = load_file(path)[stated["tensor_key"]]
    return value if tuple(value.shape) == shape else None


def _random(name: str, shape: Any, dtype: torch.dtype, axes: Mapping[str, int], content: Mapping[str, Any]) -> Any:
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


def _integers(name: str, shape: tuple[int, ...], axes: Mapping[str, int], content: Mapping[str, Any]) -> torch.Tensor:
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


def _last(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the axis that a tensor's last element gives, by tensor."""
    return dict(Axes.of(content, Path(content["name"])).last)


_LANGUAGES = ("python", "triton", "pytorch")


def reads(path: Path) -> bool:
    """Return whether a folder, or a definition's file, is a problem of this format."""
    if path.is_dir():
        return any(is_definition(file) for file in path.glob("*.json"))
    return path.suffix == ".json" and is_definition(path)


def is_definition(path: Path) -> bool:
    """Return whether a file is a definition."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"axes", "inputs", "outputs", "reference"} <= content.keys()


def problem(path: Path) -> Problem:
    """Return the problem. Raises `ProblemError`."""
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
    """Return the function ``run`` of a reference, or its last function (FlashInfer's own dumps have no ``run``)."""
    names = ["run", *(node.name for node in reversed(ast.parse(source).body) if isinstance(node, ast.FunctionDef))]
    return next((namespace[name] for name in names if callable(namespace.get(name))), None)


def _by_position(run: Any, names: tuple[str, ...]) -> Any:
    """Return the reference with results in the definition's order, also if it returns a dict."""

    def reference(*arguments: Any) -> Any:
        result = run(*arguments)
        return tuple(result[name] for name in names) if isinstance(result, dict) else result

    return reference


def _shape(axes: Axes, part: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(axes.length(name, sizes) for name in part["shape"] or ())


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
    """Return a workload's sizes, and its inputs and id under names that no axis has."""
    sizes: dict[str, Any] = {name: int(value) for name, value in workload.get("axes", {}).items() if name in axes.all}
    return {**sizes, "@inputs": workload.get("inputs", {}), "@uuid": workload.get("uuid", "")}


def solution(path: Path, of: Problem) -> Answer:
    """Return a solution of the definition: solution.json, or the first in a folder. Raises `ProblemError`."""
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
