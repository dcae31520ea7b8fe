"""A definition evaluated with one of its operations changed, in any arithmetic.

The definition, an op's or a reference's, runs over a `Tracer`, which stands before the arithmetic and sees every
operation. An operation is known by its *path*: the instructions of all functions between the definition and it, the
same at all sizes and in every iteration of a loop. A composite, such as `standardize`, is a step of its own, and is
opened into the operations of `assay.golden.arithmetic.base` where one of those is the changed one.
"""

from __future__ import annotations

import ast
import linecache
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import torch

from assay.golden.arithmetic import Arithmetic, Ball
from assay.golden.lowering.dispatch import is_of_reference
from assay.golden.lowering.spec import Definition

Path = tuple[tuple[int, int], ...]
Change = Callable[..., Any]
"""``change(tracer, right, *operands, **keywords)``: the changed result; ``right`` is the operation as it was."""

_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "index": operator.getitem,
}
_PLAIN = frozenset(  # their results are masks, ends or integers
    ["enclosure", "above", "compare", "is_finite", "topk_index", "topk_admissible", "integers", "blocks", "precision"]
)
_UNSEEN = frozenset(  # not steps: they mark numbers, or move them
    [
        "exact",
        "round",
        "unspecified",
        "spilled",
        "settled",
        "open_beyond",
        "rearranged",
        "interval",
        "hull",
        "chosen",
        "select",
        "held",
        "special",
        "any_formula",
        "in_blocks",
    ]
)
_COMPOSITES = frozenset(
    [
        "exp_shifted",
        "softmax",
        "logsumexp",
        "log_softmax",
        "gate_mul",
        "add_bias",
        "scaled_matmul",
        "gated_product",
        "quantized_matmul",
        "dequantize",
        "mean",
        "standardize",
        "silu_slope",
        "silu_gradient",
        "product",
        "weighted",
        "scores",
        "softcap",
        "delta_rule",
        "attend_backward",
        "merge",
        "attend",
        "variance",
        "at_least",
        "where_above",
        "sparse_matmul",
    ]
)


@dataclass(frozen=True)
class Step:
    """One operation of a definition: its path, its name, the operands of one run, and its text in the source."""

    path: Path
    operation: str
    operands: tuple[Any, ...] = field(compare=False)
    keywords: Mapping[str, Any] = field(compare=False)
    code: CodeType = field(compare=False)
    instruction: int = field(compare=False)
    of_reference: bool = field(compare=False, default=False)
    symbols: tuple[str, ...] = field(compare=False, default=())

    @cached_property
    def line(self) -> int:
        """The line of the source."""
        return self._position[0] or 0

    @cached_property
    def _position(self) -> tuple[int | None, int | None, int | None, int | None]:
        return list(self.code.co_positions())[self.instruction // 2]

    @cached_property
    def text(self) -> str:
        """The operation as it is written, on one line; empty if the source isn't known."""
        first, last, start, end = self._position
        if None in (first, last, start, end):
            return ""
        lines = [linecache.getline(self.code.co_filename, number) for number in range(first or 0, (last or 0) + 1)]
        if not any(lines):
            return ""
        lines[-1] = lines[-1].encode()[:end].decode(errors="ignore")
        lines[0] = lines[0].encode()[start:].decode(errors="ignore")
        return _plain(" ".join(" ".join(lines).split()))

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        """The operands as they are written, if this step is what the text says."""
        try:
            node = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError):
            return ()
        if isinstance(node, ast.BinOp) and self.operation in ("add", "sub", "mul", "div"):
            return tuple(ast.unparse(part) for part in (node.left, node.right))
        if isinstance(node, ast.Call) and not self.of_reference:
            return tuple(ast.unparse(part) for part in (*node.args, *(keyword.value for keyword in node.keywords)))
        return ()

    @property
    def subject(self) -> str:
        """The operation in words, as the subject of a sentence."""
        return f"a result of {self}" if self.of_reference else str(self)

    def operand(self, index: int) -> str:
        """Return how an operand is written, between backquotes; or its number."""
        if index < len(self._parts) and len(self._parts) >= len(self.operands) - self._is_apply:
            return f"`{self._parts[index]}`"
        value = self.operands[index] if index < len(self.operands) else None
        if isinstance(value, (int, float)):
            return f"{value:g}"
        return ("the first operand", "the second operand", "the third operand")[index]

    @property
    def _is_apply(self) -> bool:
        return self.operation in ("apply", "function")

    def __str__(self) -> str:
        line = linecache.getline(self.code.co_filename, self.line).strip()
        if self.of_reference:
            return f"line {self.line}, `{line}`" if line else f"line {self.line}"
        return f"`{self.text}`" if self.text else f"`{line}`"


def _plain(text: str) -> str:
    return text.replace("self.", "").replace("xp.", "")


class Traced:
    """A number of an arithmetic, whose operators are those of a tracer; ``origin``: the operation that gave it."""

    __slots__ = ("number", "origin", "tracer")

    def __init__(self, number: Any, tracer: Tracer, origin: tuple[str, tuple[Any, ...]] | None = None) -> None:
        self.number, self.tracer, self.origin = number, tracer, origin

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.number.shape))

    def reshape(self, *shape: Any) -> Traced:
        return Traced(self.number.reshape(*shape), self.tracer, self.origin)

    def __getitem__(self, key: Any) -> Traced:
        if isinstance(key, tuple) and not any(isinstance(part, torch.Tensor) for part in key):
            return Traced(self.number[key], self.tracer, self.origin)  # a slice
        return self.tracer.step("index", self, key)

    def __neg__(self) -> Any:
        return self.tracer.step("neg", self)

    def __add__(self, other: Any) -> Any:
        return self.tracer.step("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self.tracer.step("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self.tracer.step("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.tracer.step("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self.tracer.step("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.tracer.step("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.tracer.step("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.tracer.step("div", other, self)


class Tracer:
    """An arithmetic before ``xp``, in which the operation at ``path`` is changed; or which lists all in ``seen``."""

    def __init__(
        self, xp: Any, path: Path = (), change: Change | None = None, seen: dict[Path, Step] | None = None
    ) -> None:
        self.xp, self.hits = xp, 0
        self._path, self._change, self._seen = path, change, seen
        self._inside = 0  # a change: its own operations are none of the definition's

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.xp, name)
        if not callable(attribute) or name == "native":
            return attribute
        if name in _PLAIN:
            return lambda *given, **keywords: attribute(*_bare(given), **_bare(keywords))
        if name in _UNSEEN:
            return lambda *given, **keywords: self._kept(attribute(*_bare(given), **_bare(keywords)), given)
        return lambda *given, **keywords: self.step(name, *given, **keywords)

    def _kept(self, result: Any, given: Sequence[Any]) -> Any:
        origin = next((part.origin for part in given if isinstance(part, Traced)), None)
        return self._traced(result, origin)

    def _traced(self, result: Any, origin: Any) -> Any:
        if isinstance(result, (tuple, list)):
            return type(result)(self._traced(part, origin) for part in result)
        is_number = isinstance(result, (Ball, Traced)) or (
            isinstance(result, torch.Tensor) and result.is_floating_point()
        )
        return Traced(result, self, origin) if is_number else result

    def any_formula(self, *formulas: Callable[[], Any]) -> Any:
        """Return a number that kernels compute by any of several formulas; the first alone if the change is in it."""
        before = self.hits
        first = formulas[0]()
        if self._seen is not None or (self._path and self.hits > before):
            return first
        return self._traced(self.xp.any_formula(*(lambda f=f: _bare(f()) for f in formulas)), first.origin)

    def in_blocks(self, function: Callable[..., Any], *numbers: Any, whole: int = 0) -> Any:
        """Return ``function(*numbers)``."""
        return function(*numbers)

    def step(self, name: str, *operands: Any, **keywords: Any) -> Any:
        """Return the result of an operation, the changed one where it is the one to change."""
        if self._inside or (self._change is None and self._seen is None):
            return self.right(name, *operands, **keywords)
        path, frame = _path()
        if self._seen is not None:
            of_reference = frame is not None and _is_users(frame)
            if frame is not None:
                self._seen.setdefault(
                    path, Step(path, name, operands, keywords, frame.f_code, frame.f_lasti, of_reference)
                )
            return (
                self._opened(name, *operands, **keywords)
                if name in _COMPOSITES
                else self.right(name, *operands, **keywords)
            )
        if path == self._path:
            assert self._change is not None
            self.hits += 1
            self._inside += 1
            try:
                return self._change(self, lambda *o, **k: self.right(name, *o, **k), *operands, **keywords)
            finally:
                self._inside -= 1
        if name in _COMPOSITES and self._path[-len(path) :] == path:
            return self._opened(name, *operands, **keywords)
        return self.right(name, *operands, **keywords)

    def right(self, name: str, *operands: Any, **keywords: Any) -> Any:
        """Return the result of the right operation."""
        function = _OPERATORS.get(name) or getattr(self.xp, name)
        return self._traced(function(*_bare(operands), **_bare(keywords)), (name, operands))

    def _opened(self, name: str, *operands: Any, **keywords: Any) -> Any:
        """Return a composite operation by its parts, each a step."""
        function: Any = _attend if name == "attend" else getattr(Arithmetic, name)
        return function(self, *operands, **keywords)


def _attend(xp: Any, scores: Any, visible: Any, values: Any, sinks: Any) -> tuple[Any, Any]:
    blind = ~visible.any(-1)[..., None]
    masked = xp.where(visible | blind, scores, -math.inf)
    if sinks is not None:
        sink = xp.rearranged(lambda arrays: arrays[0].expand(*masked.shape[:-1], 1), [sinks])
        masked = xp.concatenate([masked, sink], -1)
    weights = xp.softmax(masked)[..., : scores.shape[-1]]
    weights = xp.round(xp.where(visible, weights, 0.0), "probabilities")
    return xp.weighted(weights, values), xp.logsumexp(masked)


def _bare(given: Any) -> Any:
    """Return operands as numbers of the arithmetic itself."""
    if isinstance(given, Traced):
        return given.number
    if isinstance(given, (tuple, list)):
        return type(given)(map(_bare, given)) if type(given) in (tuple, list) else given
    if isinstance(given, dict):
        return {name: _bare(value) for name, value in given.items()}
    return given


def _run(definition: Callable[..., Any], tracer: Tracer, tensors: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Return the bare results of a definition; the outermost function of all paths."""

    def numbers(value: Any) -> Any:
        return tracer._traced(value, None)

    given = {name: numbers(value) for name, value in options.items()}
    return _bare(definition(tracer, *map(numbers, tensors), **given))


def _path() -> tuple[Path, FrameType | None]:
    """Return the instructions from the operation to the definition, and the innermost function of the source."""
    frame: FrameType | None = sys._getframe(2)
    parts: list[tuple[int, int]] = []
    innermost, users = None, None
    while frame is not None and frame.f_code is not _run.__code__:
        if frame.f_globals is not _GLOBALS:
            parts.append((id(frame.f_code), frame.f_lasti))
            innermost = innermost or frame
            users = users or (frame if _is_users(frame) else None)
        frame = frame.f_back
    return tuple(parts), users or innermost


def _is_users(frame: FrameType) -> bool:
    return not frame.f_globals.get("__name__", "").startswith("assay.") and is_of_reference(frame)


_GLOBALS = globals()


def _first_form(definition: Any) -> Any:
    return replace(definition, forms=definition.forms[:1]) if isinstance(definition, Definition) else definition


def changed(definition: Callable[..., Any], path: Path, change: Change) -> Callable[..., Any]:
    """Return a definition with the operation at a path changed; of a reference its first form."""
    definition = _first_form(definition)

    def altered(xp: Any, *tensors: Any, **options: Any) -> Any:
        return _run(definition, Tracer(xp, path, change), tensors, options)

    return altered


def steps_of(definition: Callable[..., Any], evaluate: Callable[[Any], Any]) -> list[Step]:
    """Return the operations of a definition in ``evaluate(definition)``, in their order."""
    seen: dict[Path, Step] = {}
    definition = _first_form(definition)
    evaluate(lambda xp, *tensors, **options: _run(definition, Tracer(xp, seen=seen), tensors, options))
    return list(seen.values())
