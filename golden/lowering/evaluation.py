"""Running a reference in an arithmetic: a dispatch mode that sees every ATen operation, and computes with numbers.

An operation with a lowering rule is computed by it; views change a tensor's geometry; in-place operations write what
their functional form gives; anything else is decomposed as PyTorch does it, and its parts come here again.
Floating-point tensors from outside (parameters, buffers, constants) are numbers from their first use on, and are never
written to.
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

from assay.golden.errors import MissingOperation, Undecided
from assay.golden.lowering.table import RULES
from assay.golden.lowering.tensor import Box, NumberTensor, contiguous_strides, read, write

MOST_BRANCHES = 16
"""How many answers to comparisons and choices, taken together, a reference is run over again for."""
_WIDER = {torch.float64: 3, torch.float32: 2, torch.bfloat16: 1, torch.float16: 1}
_HERE = __name__.rpartition(".")[0]


class Evaluation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One run of a reference over numbers of the arithmetic ``xp``.

    ``operands``: the dtype to which kernels round what enters products (that of the inputs, where it has 16 bits).
    ``overflowed``: whether an exponential that float64 can't hold was used, so that infinities and NaN say nothing.
    ``answers`` are the first of the answers to questions that numbers leave open; `asked` gathers, for each question,
    all that are admissible, the one taken first.
    """

    def __init__(self, xp: Any, operands: torch.dtype | None = None, answers: Sequence[Any] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules and Evaluation.__torch_dispatch__ is _DISPATCH:
            Evaluation.__torch_dispatch__ = torch._disable_dynamo(_DISPATCH)  # type: ignore[method-assign, attr-defined]
        self.xp = xp
        self.operands = operands
        self.answers = answers
        self.asked: list[list[Any]] = []
        self.overflowed = False
        self._decomposing: list[Any] = []
        self._outside: dict[int, tuple[torch.Tensor, NumberTensor]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # a mode is kept from being compiled by importing the compiler: seconds, where nobody else did

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if func is torch.ops.aten.view.dtype and args[1] != args[0].dtype:  # its bits, of a copy
            return self.exactly(self.known(args[0]).view(args[1]))
        if any(isinstance(leaf, NumberTensor) or leaf.is_floating_point() for leaf in tensors):
            return self._compute(func, args, kwargs)
        if func in CREATIONS:
            return CREATIONS[func](self, func, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refusal(func, "draws random numbers")
        result = func(*args, **kwargs)
        floating = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if floating and tensors:
            return self._compute(func, args, kwargs)
        return tree_map(self.exactly, result) if floating else result

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = RULES.get(func)
        if found is not None:
            return found(self, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refusal(func, "draws random numbers")
        if func.namespace == "prims" and hasattr(func, "impl_aten") and func not in self._decomposing:
            self._decomposing.append(func)
            try:
                with self:
                    return func.impl_aten(*args, **kwargs)
            finally:
                self._decomposing.pop()
        kind = _kind(func)
        if kind == "composite":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if kind == "geometry":  # of the tensor itself: its numbers stay where they are
            with torch._C._DisableTorchDispatch():
                func(self.adopted(args[0]), *args[1:], **kwargs)
            return args[0]
        if kind == "view":
            return self._view(func, args, kwargs)
        if kind == "in place":
            return self._in_place(func, args, kwargs)
        decomposition = _decompositions().get(func)
        if func in RULES:  # loading them has brought it
            return RULES[func](self, *args, **kwargs)
        if decomposition is not None and func not in self._decomposing:
            self._decomposing.append(func)  # one that is made of itself is none
            try:
                with self:
                    return decomposition(*args, **kwargs)
            finally:
                self._decomposing.pop()
        raise self.refusal(func, "has neither a lowering rule nor a decomposition")

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[0] if isinstance(args[0], NumberTensor) else self.adopted(args[0])
        length = source.storage_offset() + sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True))
        memory = torch.empty(max(length + 1, 0), dtype=source.dtype, device="meta")
        geometry = memory.as_strided(source.shape, source.stride(), source.storage_offset())
        others = [_meta(arg) for arg in args[1:]]
        results = func(geometry, *others, **kwargs)

        def shared(like: torch.Tensor) -> NumberTensor:
            if like.dtype != source.dtype:
                raise self.refusal(func, "reads numbers' bits")
            return NumberTensor(self, source.box, like.dtype, like.shape, like.stride(), int(like.storage_offset()))

        return [shared(like) for like in results] if isinstance(results, (list, tuple)) else shared(results)

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the functional form gives, written into the arguments that the operation writes to."""
        functional, targets = _functional(func)
        if functional is None:
            raise self.refusal(func, "writes in place and has no functional form")
        names = [argument.name for argument in func._schema.arguments]
        bound = {**dict(zip(names, args, strict=False)), **kwargs}
        written = [bound.pop(name) for name in targets] if func._schema.name[-1] != "_" else [bound[targets[0]]]
        plain = {argument.name for argument in functional._schema.arguments}
        with self:
            results = functional(**{name: value for name, value in bound.items() if name in plain})
        for target, result in zip(written, results if isinstance(results, (tuple, list)) else [results], strict=False):
            self.assign(target, result)
        return written[0] if len(written) == 1 else tuple(written)

    def assign(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """``value`` copied into a tensor, cast to its dtype."""
        if not isinstance(target, NumberTensor) and not target.is_floating_point():
            if isinstance(value, NumberTensor):
                value = self.known(value)
            target.copy_(value)
            return
        holder = self.adopted(target)
        value = self.cast(value, holder.dtype)
        if isinstance(value, NumberTensor):
            write(holder, read(value, unrounded=True), value.box.stage)
        else:
            write(holder, self.number(value))

    def adopted(self, tensor: torch.Tensor) -> NumberTensor:
        """A tensor as numbers: one from outside once and for all, so that all uses of it see what is written to it."""
        if isinstance(tensor, NumberTensor):
            return tensor
        if not tensor.is_floating_point():
            return self._tensor(Box(self.xp.exact(tensor)), tensor.dtype, tuple(tensor.shape))
        if id(tensor) not in self._outside:
            self._outside[id(tensor)] = (tensor, self.exactly(tensor))
        return self._outside[id(tensor)][1]

    def exactly(self, tensor: Any) -> Any:
        """A floating-point tensor as the numbers that it holds; anything else as it is."""
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, NumberTensor) or not tensor.is_floating_point():
            return tensor
        number = self.xp.exact(tensor.detach().to(torch.float64))
        return self._tensor(Box(number), tensor.dtype, tuple(tensor.shape))

    def _tensor(self, box: Box, dtype: torch.dtype, shape: Sequence[int]) -> NumberTensor:
        return NumberTensor(self, box, dtype, shape, contiguous_strides(shape), 0)

    def later(self, number: Callable[[], Any], dtype: torch.dtype, shape: Sequence[int]) -> NumberTensor:
        """A new tensor of a number that is made where it is first asked for."""
        return self._tensor(Box(number), dtype, tuple(shape))

    def number(self, tensor: torch.Tensor) -> Any:
        """The number that a tensor is; integers and masks as numbers too."""
        if isinstance(tensor, NumberTensor) or tensor.is_floating_point():
            return read(self.adopted(tensor))
        return self.xp.exact(tensor)

    def made(self, number: Any, dtype: torch.dtype, stage: str = "", weights: bool = False) -> torch.Tensor:
        """A new tensor of a number; of integers and masks that are known a plain one."""
        if not dtype.is_floating_point:
            least, most = self.xp.enclosure(number)
            if torch.equal(least, most):
                return least.to(dtype)
        elif dtype.itemsize < 4 and not stage:
            stage = f"eager_{str(dtype).removeprefix('torch.')}"
        number = self.xp.settled(number)
        return self._tensor(Box(number, stage, weights=weights), dtype, tuple(map(int, number.shape)))

    def computed(self, names: str, numbers: Sequence[Any], result: Any) -> None:
        """An elementwise operation was made, of these numbers, with this result; here that is nothing."""

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A copy in another dtype: of a narrower float a rounding that a kernel may make, of a wider one nothing."""
        if not isinstance(tensor, NumberTensor) and not tensor.is_floating_point():
            if not dtype.is_floating_point:
                return tensor.to(dtype)
            source: Any = self.xp.exact(tensor)
            return self.made(source, dtype, _stage(torch.int64, dtype))
        held = self.adopted(tensor)
        if dtype == torch.bool:
            number = read(held)
            order = self.xp.compare(number, self.xp.exact(torch.zeros((), dtype=torch.float64)))
            ends = (order.less | order.more | order.unordered), ~order.same
            return self.made(self.xp.interval(*(end.double() for end in ends)), dtype)
        if not dtype.is_floating_point:
            return self.made(self.xp.step(torch.trunc, read(held)), dtype)
        stage = _stage(held.dtype, dtype)
        same = not stage and bool(held.box.stage) and held.dtype == dtype
        return self.made(read(held, unrounded=same), dtype, held.box.stage if same else stage, held.box.weights)

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor as plain numbers, all of which are known; else `Undecided`."""
        if not isinstance(tensor, NumberTensor) and not tensor.is_floating_point():
            return tensor
        least, most = self.xp.enclosure(self.number(tensor))
        if bool((open_ := (least != most) & ~(least.isnan() & most.isnan())).any()):
            raise self.undecided(f"{int(open_.sum())} of {least.numel()} numbers")
        return least.to(tensor.dtype)

    def answer(self, admissible: Sequence[Any]) -> Any:
        """One of the admissible answers to a question; the others are taken in runs of their own."""
        place = len(self.asked)
        if len(admissible) > MOST_BRANCHES:
            raise self.undecided(f"a choice among {len(admissible)}")
        taken = self.answers[place] if place < len(self.answers) else admissible[0]
        self.asked.append([taken, *(other for other in admissible if other != taken)])
        return taken

    def undecided(self, what: str) -> Undecided:
        """The error of a question that numbers leave open."""
        line = asking_line()
        return Undecided(f"{line}: {what} that rounding leaves open decide what is computed next", line)

    def refusal(self, func: Any, why: str) -> MissingOperation:
        """The error of an operation that can't be evaluated."""
        name = str(func)
        mend = "" if "random" in why else f"; to add one, write @rule({name[5:]!r}) in assay.golden.lowering.rules"
        return MissingOperation(f"{asking_line()}: {name} {why}{mend}")


_DISPATCH = Evaluation.__torch_dispatch__
CREATIONS: dict[Any, Callable[..., Any]] = {}
"""Operations that make tensors of no tensors' numbers, by ATen overload: of the evaluation, themselves, arguments."""


def branches(
    evaluated: Callable[[Evaluation], Any],
    xp: Any,
    operands: torch.dtype | None,
    make: Callable[..., Evaluation] = Evaluation,
) -> list[Any]:
    """What a reference gives under each of the admissible answers to what it asks; ``make`` makes the evaluations."""
    waiting: list[list[Any]] = [[]]
    results = []
    while waiting:
        answers = waiting.pop()
        evaluation = make(xp, operands, answers)
        results.append(evaluated(evaluation))
        taken = [admissible[0] for admissible in evaluation.asked]
        for place in range(len(answers), len(taken)):
            waiting += [[*taken[:place], other] for other in evaluation.asked[place][1:]]
        if len(results) + len(waiting) > MOST_BRANCHES:
            raise Undecided(f"rounding leaves more than {MOST_BRANCHES} ways through the reference open")
    return results


def asking_line() -> str:
    """The line of the reference that is being run: the innermost that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of_reference(frame):
            code = frame.f_code
            return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "the reference"


def is_of_reference(frame: FrameType) -> bool:
    """Whether a frame is neither PyTorch's nor ours."""
    name = frame.f_globals.get("__name__", "")
    return not name.startswith(("torch.", _HERE)) and name not in ("torch", "contextlib", "functools")


def _stage(source: torch.dtype, target: torch.dtype) -> str:
    """The rounding that a cast is, by the name of the narrower format; none of a wider or the same one."""
    if source == target or _WIDER.get(target, 0) >= 2:
        return ""
    return str(target).removeprefix("torch.")


def _meta(arg: Any) -> Any:
    return torch.empty(arg.shape, dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@cache
def _kind(func: Any) -> str:
    """ "composite" (of others), "geometry" (set in place), "view", "in place" or "plain"."""
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
    """The functional form of an operation that writes to its arguments, and the names of those."""
    schema = func._schema
    targets = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None, targets
    if name.endswith("_"):
        candidates: Iterable[str] = [func._overloadname]
    else:
        candidates = packet.overloads()
    wanted = {arg.name for arg in schema.arguments} - (set() if name.endswith("_") else set(targets))
    for overload in candidates:
        form = getattr(packet, overload, None)
        if form is None or form._schema.is_mutable:
            continue
        if name.endswith("_") or {arg.name for arg in form._schema.arguments} <= wanted:
            return form, targets
    return None, targets


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table  # loaded on first use: it takes a second

    RULES[torch.ops.prims.convert_element_type.default] = Evaluation.cast
    return decomposition_table
