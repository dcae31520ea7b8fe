"""Running a reference in an arithmetic: a dispatch mode that sees every ATen operation and computes with numbers.

An operation with a lowering rule is computed by it. Views change a tensor's geometry; in-place operations write the
result of their functional form; anything else is decomposed as PyTorch does it, and its parts come here again.
Floating-point tensors from outside (parameters, buffers, constants) become numbers on first use and are never written
to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from assay.golden.arithmetic.ball import Ball
from assay.golden.errors import MissingOperation, Undecided
from assay.golden.lowering.choices import Between, Choices, Decision
from assay.golden.lowering.rule_table import RULES
from assay.golden.lowering.tensor import TracedMemory, TracedTensor, contiguous_strides, read, write

MAX_BRANCHES = 16
"""Limit on the runs of one reference: one for each combination of admissible answers to comparisons and choices."""
_WIDTH_RANK = {torch.float64: 3, torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}
_FINER = (torch.float64, torch.int32, torch.int64)  # have numbers that float32 lacks
_THIS_PACKAGE = __name__.rpartition(".")[0]


class Lowering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One run of a reference over numbers of the arithmetic ``xp``; rules get it as ``ctx``.

    ``operand_dtype``: the 16-bit dtype of the inputs, to which kernels round operands of products; None if wider.
    ``overflowed``: an exponential beyond float64's range was used, so infinities and NaN tell nothing.
    ``choices``: what the run takes where its numbers leave decisions open; by default the interval of all answers.
    """

    def __init__(self, xp: Any, operand_dtype: torch.dtype | None = None, choices: Choices | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A mode is kept from being compiled by importing the compiler, which takes seconds: only where it is loaded.
        if "torch._dynamo" in sys.modules and Lowering.__torch_dispatch__ is _DISPATCH:
            Lowering.__torch_dispatch__ = torch._disable_dynamo(_DISPATCH)  # type: ignore[method-assign, attr-defined]
        self.xp = xp
        self.operand_dtype = operand_dtype
        self.choices = choices or Choices()
        self.overflowed = False
        self._decomposing: list[Any] = []
        self._outside: dict[int, tuple[torch.Tensor, TracedTensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see __init__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.view.dtype and args[1] != args[0].dtype:  # the bits of a copy
            return self.lift(self.concrete(args[0]).view(args[1]))
        if any(isinstance(leaf, TracedTensor) or leaf.is_floating_point() for leaf in tensors):
            return self._compute(func, args, kwargs)
        if func in CREATIONS:
            return CREATIONS[func](self, func, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.unsupported(func, "draws random numbers")
        result = func(*args, **kwargs)
        floating = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if floating and tensors:
            return self._compute(func, args, kwargs)
        return tree_map(self.lift, result) if floating else result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in RULES:
            return RULES[func](self, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.unsupported(func, "draws random numbers")
        if func.namespace == "prims" and hasattr(func, "impl_aten") and func not in self._decomposing:
            return self._decompose(func, func.impl_aten, args, kwargs)
        kind = _kind(func)
        if kind == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if kind == "geometry":  # the numbers stay where they are
            with torch._C._DisableTorchDispatch():
                func(self.traced(args[0]), *args[1:], **kwargs)
            return args[0]
        if kind == "view":
            return self._view(func, args, kwargs)
        if kind == "in place":
            return self._inplace(func, args, kwargs)
        decomposition = _decompositions().get(func)
        if func in RULES:  # `_decompositions` adds one
            return RULES[func](self, *args, **kwargs)
        if decomposition is not None and func not in self._decomposing:  # some decompositions call themselves
            return self._decompose(func, decomposition, args, kwargs)
        raise self.unsupported(func, "has neither a lowering rule nor a decomposition")

    def _decompose(self, func: Any, decomposition: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._decomposing.append(func)
        try:
            with self:
                return decomposition(*args, **kwargs)
        finally:
            self._decomposing.pop()

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = self.traced(args[0])
        length = source.storage_offset() + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        buffer = torch.empty(max(length + 1, 0), dtype=source.dtype, device="meta")
        geometry = buffer.as_strided(source.shape, source.stride(), source.storage_offset())
        results = func(geometry, *map(_meta, args[1:]), **kwargs)

        def shared(like: torch.Tensor) -> TracedTensor:
            if like.dtype != source.dtype:
                raise self.unsupported(func, "reads numbers' bits")
            return TracedTensor(self, source.memory, like.dtype, like.shape, like.stride(), int(like.storage_offset()))

        return [shared(like) for like in results] if isinstance(results, (list, tuple)) else shared(results)

    def _inplace(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Write the results of the functional form into the arguments that the operation writes to."""
        functional, targets = _functional(func)
        if functional is None:
            raise self.unsupported(func, "writes in place and has no functional form")
        names = [argument.name for argument in func._schema.arguments]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [bound.pop(name) for name in targets] if func._schema.name[-1] != "_" else [bound[targets[0]]]
        accepted = {argument.name for argument in functional._schema.arguments}
        with self:
            results = functional(**{name: value for name, value in bound.items() if name in accepted})
        for target, result in zip(written, results if isinstance(results, (tuple, list)) else [results], strict=False):
            self.assign(target, result)
        return written[0] if len(written) == 1 else tuple(written)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Copy ``value`` into a tensor, cast to its dtype."""
        if not isinstance(target, TracedTensor) and not target.is_floating_point():
            target.copy_(self.concrete(value) if isinstance(value, TracedTensor) else value)
            return
        traced = self.traced(target)
        value = self.cast(value, traced.dtype)
        if isinstance(value, TracedTensor):
            write(traced, read(value, unrounded=True), value.memory.stage)
        else:
            write(traced, self.number(value))

    def traced(self, tensor: torch.Tensor) -> TracedTensor:
        """Trace a tensor; one from outside only once, so that all its uses see later writes."""
        if isinstance(tensor, TracedTensor):
            return tensor
        if not tensor.is_floating_point():
            return self._tensor(TracedMemory(self.xp.exact(tensor)), tensor.dtype, tuple(tensor.shape))
        if id(tensor) not in self._outside:
            self._outside[id(tensor)] = (tensor, self.lift(tensor))
        return self._outside[id(tensor)][1]

    def lift(self, tensor: Any) -> Any:
        """Trace a floating-point tensor as the exact numbers that it holds; return anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, TracedTensor) or not tensor.is_floating_point():
            return tensor
        number = self.xp.exact(tensor.detach().to(torch.float64))
        return self._tensor(TracedMemory(number), tensor.dtype, tuple(tensor.shape))

    def _tensor(self, memory: TracedMemory, dtype: torch.dtype, shape: Sequence[int]) -> TracedTensor:
        return TracedTensor(self, memory, dtype, shape, contiguous_strides(shape), 0)

    def deferred(self, number: Callable[[], Any], dtype: torch.dtype, shape: Sequence[int]) -> TracedTensor:
        """Return a new tensor whose number is computed on first use."""
        return self._tensor(TracedMemory(number), dtype, tuple(shape))

    def number(self, tensor: torch.Tensor) -> Any:
        """Return the number of a tensor; integers and masks as numbers too."""
        if isinstance(tensor, TracedTensor) or tensor.is_floating_point():
            return read(self.traced(tensor))
        return self.xp.exact(tensor)

    def wrap(self, number: Any, dtype: torch.dtype, stage: str = "", is_softmax: bool = False) -> torch.Tensor:
        """Return a new tensor of a number; a plain one of integers and masks that are known."""
        if not dtype.is_floating_point:
            low, high = self.xp.enclosure(number)
            if torch.equal(low, high):
                return low.to(dtype)
        elif dtype.itemsize < 4 and not stage:
            stage = f"eager_{str(dtype).removeprefix('torch.')}"
        number = self.xp.settled(number)
        return self._tensor(TracedMemory(number, stage, is_softmax=is_softmax), dtype, tuple(map(int, number.shape)))

    def observe(self, names: str, numbers: Sequence[Any], result: Any) -> None:
        """Hook for subclasses: an elementwise operation of these numbers gave this result."""

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy to another dtype: to a float that lacks numbers of it a rounding that a kernel may make, else exact."""
        if not isinstance(tensor, TracedTensor) and not tensor.is_floating_point():
            if not dtype.is_floating_point:
                return tensor.to(dtype)
            return self.wrap(self.xp.exact(tensor), dtype, _stage(torch.int64, dtype))
        traced = self.traced(tensor)
        if dtype == torch.bool:
            number = read(traced)
            order = self.xp.compare(number, self.xp.exact(torch.zeros((), dtype=torch.float64)))
            return self.decided_mask(order.less | order.more | order.unordered, ~order.same, lambda: ~order.same)
        if not dtype.is_floating_point:
            return self.wrap(self._whole(read(traced), dtype), dtype)
        memory, stage = traced.memory, _stage(traced.dtype, dtype)
        same = not stage and bool(memory.stage) and traced.dtype == dtype
        return self.wrap(read(traced, unrounded=same), dtype, memory.stage if same else stage, memory.is_softmax)

    def _whole(self, number: Any, dtype: torch.dtype) -> Any:
        """Return numbers cut to integers of a dtype; unknown where one is NaN or out of its range, as C++ has it."""
        limits = torch.iinfo(dtype)
        low, high = self.xp.enclosure(number)
        lost = ~((low > limits.min - 1.0) & (high < limits.max + 1.0))
        if not bool(lost.any()):
            return self.step(torch.trunc, number)
        whole = self.step(torch.trunc, self.xp.chosen(lost, self.xp.exact(torch.zeros_like(low)), number))
        ends = torch.full_like(low, torch.inf)
        return self.xp.chosen(lost, self.xp.interval(-ends, ends), whole)

    def concrete(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain numbers of a tensor, all of which must be known; raise `Undecided` otherwise."""
        if not isinstance(tensor, TracedTensor) and not tensor.is_floating_point():
            return tensor
        low, high = self.xp.enclosure(self.number(tensor))
        if bool((unknown := (low != high) & ~(low.isnan() & high.isnan())).any()):
            raise self.undecided(f"{int(unknown.sum())} of {low.numel()} numbers")
        return low.to(tensor.dtype)

    def decided(self, decision: Decision, dtype: torch.dtype) -> torch.Tensor:
        """Return what this run takes for the decisions of a site, as integers or a mask; plain ones if it takes one
        answer to each."""
        least, most = self.choices.take(decision, calling_line)
        if torch.equal(least, most):
            return least.to(dtype)
        return self.wrap(self.xp.interval(least.double(), most.double()), dtype)

    def decided_mask(
        self, certain: torch.Tensor, possible: torch.Tensor, guess: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return a mask that is ``certain`` at some elements and ``possible`` at others; ``guess`` is the likeliest."""
        if torch.equal(certain, possible):
            self.choices.count += 1
            return certain
        likeliest = (guess() | certain) & possible
        return self.decided(Between(certain.double(), possible.double(), likeliest.double()), torch.bool)

    def step(self, function: Callable[[torch.Tensor], torch.Tensor], number: Any) -> Any:
        """Return a rising step function of a number (floor, ceil, trunc, round, sign)."""
        least, most = map(function, self.xp.enclosure(number))
        guess = function(middle(self.xp, number))
        least, most = self.choices.take(Between(least, most, guess), calling_line)
        return self.xp.interval(least, most)

    def branch(self, admissible: Sequence[Any]) -> Any:
        """Return one of the admissible answers to a Python number that is open; other runs take the others."""
        taken, number = self.choices, len(self.choices.branches)
        if len(admissible) > MAX_BRANCHES or type(taken) is not Choices:
            raise self.undecided(f"a choice among {len(admissible)}")
        answer = taken.answers[number] if number < len(taken.answers) else admissible[0]
        taken.branches.append([answer, *(other for other in admissible if other != answer)])
        return answer

    def undecided(self, what: str) -> Undecided:
        """Return the error of a decision that the numbers leave open."""
        line = calling_line()
        return Undecided(f"{line}: {what} that rounding leaves open decide what is computed next", line)

    def unsupported(self, func: Any, why: str) -> MissingOperation:
        """Return the error of an operation that can't be lowered."""
        name = str(func)
        mend = "" if "random" in why else f"; to add one, write @rule({name[5:]!r}) in assay.golden.lowering.rules"
        return MissingOperation(f"{calling_line()}: {name} {why}{mend}")


_DISPATCH = Lowering.__torch_dispatch__
CREATIONS: dict[Any, Callable[..., Any]] = {}
"""Operations that create tensors without tensor arguments, by ATen overload: ``(ctx, overload, *arguments)``."""


def run_branches(
    run: Callable[[Lowering], Any], xp: Any, operand_dtype: torch.dtype | None, make: Callable[..., Lowering] = Lowering
) -> list[Any]:
    """Run a reference once for each combination of admissible answers; ``make`` makes the lowerings."""
    pending: list[list[Any]] = [[]]
    results = []
    while pending:
        answers = pending.pop()
        choices = Choices(answers)
        results.append(run(make(xp, operand_dtype, choices)))
        taken = [admissible[0] for admissible in choices.branches]
        for number in range(len(answers), len(taken)):
            pending += [[*taken[:number], other] for other in choices.branches[number][1:]]
        if len(results) + len(pending) > MAX_BRANCHES:
            raise Undecided(f"rounding leaves more than {MAX_BRANCHES} ways through the reference open")
    return results


def middle(xp: Any, number: Any) -> torch.Tensor:
    """Return the likeliest values of numbers."""
    if isinstance(number, Ball):
        return number.mid
    low, high = xp.enclosure(number)
    return torch.where(low == high, low, low / 2 + high / 2)


def calling_line() -> str:
    """Return the line of the reference that is running: the innermost outside PyTorch and this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_reference(frame):
            code = frame.f_code
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "the reference"


def is_of_reference(frame: FrameType) -> bool:
    """Whether a frame is outside PyTorch and this package."""
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("torch.", _THIS_PACKAGE)) and name not in ("torch", "contextlib", "functools")


def _stage(source: torch.dtype, target: torch.dtype) -> str:
    """Return the rounding that a cast is, by the name of the narrower format; empty if there is none."""
    if source == target or (_WIDTH_RANK.get(target, 0) >= 2 and (target != torch.float32 or source not in _FINER)):
        return ""
    return str(target).removeprefix("torch.")


def _meta(arg: Any) -> Any:
    return torch.empty(arg.shape, dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@cache
def _kind(func: Any) -> str:
    """Classify: "composite" (of others), "geometry" (set in place), "view", "in place" or "plain"."""
    schema = func._schema
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return "composite"
    if torch.Tag.inplace_view in func.tags and func._schema.name.endswith("_"):
        return "geometry"
    if schema.is_mutable:
        return "in place"
    aliased = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    return "view" if aliased else "plain"


@cache
def _functional(func: Any) -> tuple[Any, list[str]]:
    """Return the functional form of an operation that writes to its arguments, and the names of those."""
    schema = func._schema
    targets = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None, targets
    inplace = name.endswith("_")
    candidates: Iterable[str] = [func._overloadname] if inplace else packet.overloads()
    available = {arg.name for arg in schema.arguments} - (set() if inplace else set(targets))
    for overload in candidates:
        form = getattr(packet, overload, None)
        if form is None or form._schema.is_mutable:
            continue
        if inplace or {arg.name for arg in form._schema.arguments} <= available:
            return form, targets
    return None, targets


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table  # on first use: loading takes a second

    RULES[torch.ops.prims.convert_element_type.default] = Lowering.cast
    return decomposition_table
