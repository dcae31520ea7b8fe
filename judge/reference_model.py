"""The reference of a problem as a model: golden, tolerance, and the integers that rounding leaves undetermined.

Floating-point results are judged by the golden and the contract. An integer result (an index of a maximum) may depend
on how the reference itself rounds: in another order of summation another of two close numbers is the larger. So the
reference also runs with every rounded intermediate result perturbed by about one rounding error, and with ties broken
at random where PyTorch doesn't specify the winner; integers that change are left open. Results that float64 shows to
be exact are not perturbed.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from assay.golden.lowering import reference_spec
from assay.judge.problems.problem import Instance, ProblemError
from assay.judge.problems.running import explaining
from assay.judge.solution.host import parts
from assay.runtime.environment import generators_kept, seed_generators, standard_environment
from assay.runtime.errors import one_line
from assay.verify.cases.case import Case
from assay.verify.comparison.oracle import Oracle
from assay.verify.comparison.result import Result
from assay.verify.contract import Contract
from assay.verify.findings import Failure

Tensor = torch.Tensor

_DRAWS = 32  # perturbed runs: an even choice of two values is missed once in 2^32
_ROUNDINGS = 4.0  # unit roundoffs by which a result is moved, of its terms' absolute values where it is a sum
_LEAST = 2.0**-160  # below the smallest number of every format up to float32
_TIED = ("topk", "sort", "max", "min", "kthvalue", "median", "nanmedian", "mode")
"""Operations that may select any of equal numbers; argmax and argmin select the first."""
_SUMS = (
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "convolution", "sum", "mean", "cumsum", "nansum",
    "_scaled_mm", "native_layer_norm", "add", "sub", "rsub", "addcmul",
)  # fmt: skip


def left_open(results: Callable[[], Sequence[Tensor]], expected: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Return a bool mask for each result: elements that differ from ``expected`` in perturbed runs."""
    entries = [torch.zeros(part.shape, dtype=torch.bool) for part in expected]
    for draw in range(_DRAWS):
        with torch.no_grad(), _Disturbed(seed + draw):
            parts = results()
        for mask, part, right in zip(entries, parts, expected, strict=True):
            if part.shape == right.shape:
                mask |= part != right
    return entries


class _Disturbed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every rounded result is perturbed by a few unit roundoffs."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise entering the mode imports torch._dynamo, which takes seconds (torch 2.13)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _TIED and _is_rounded(args[0]) and not kwargs.get("stable") and len(args) + len(kwargs) > 1:
            x = args[0].double()
            noise = self._noise(
                x, x.abs().clamp(min=_LEAST) * 2.0**20
            )  # breaks ties; far below the dtype's own spacing
            results = func(x + noise, *args[1:], **kwargs)
            return tree_map(lambda part: part.to(args[0].dtype) if _is_rounded(part) else part, results)
        if not any(_is_rounded(part) for part in args) or _is_view(func):
            return func(*args, **kwargs)
        exact, size = _wide(func, args, kwargs, name in _SUMS)
        result = func(*args, **kwargs)
        if not _is_rounded(result) or exact is None or exact.shape != result.shape:
            return result
        noise = torch.where(exact == result.double(), 0.0, self._noise(result, size))
        moved = (result + noise).to(result.dtype)
        return result.copy_(moved) if func._schema.is_mutable else moved

    def _noise(self, x: Tensor, size: Tensor) -> Tensor:
        chance = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return (_ROUNDINGS * torch.finfo(x.dtype).eps * chance * size).to(x.dtype)


def _wide(func: Any, args: Any, kwargs: Any, is_sum: bool) -> tuple[Tensor | None, Tensor]:
    """Return the float64 result (None if there is none), and for a sum that of the arguments' absolute values."""
    try:
        exact = func(*tree_map(_double, args), **kwargs)
        if not isinstance(exact, Tensor) or exact.dtype != torch.float64:
            return None, torch.empty(0)
        size = func(*tree_map(lambda part: _abs(_double(part)), args), **kwargs) if is_sum else exact
    except (RuntimeError, TypeError, ValueError):
        return None, torch.empty(0)
    return exact, size.abs()


def _is_rounded(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.device.type == "cpu"


def _is_view(func: Any) -> bool:
    """Return whether an operation's result is a view of its argument, and it writes nothing."""
    returns = func._schema.returns
    return any(part.alias_info is not None for part in returns) and not func._schema.is_mutable


def _double(value: Any) -> Any:
    return value.double().clone() if _is_rounded(value) else value


def _abs(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


_OPEN = "integers that a tie or a rounding of the reference leaves open"
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


@dataclass(frozen=True)
class ReferenceModel:
    """A reference with parameters, at one choice of sizes.

    ``evaluating``: its module runs in evaluation mode because it draws random numbers in training mode. ``nesting`` is
    how lists and tuples nest in its result.
    """

    instance: Instance
    contract: Contract
    name: str
    state: Mapping[str, Tensor] = field(default_factory=dict)
    evaluating: bool = False
    nesting: str = ""

    @staticmethod
    def of(instance: Instance, contract: Contract, name: str) -> ReferenceModel:
        """Return the reference with its constructor's parameters. Raises `ProblemError` if it draws random numbers."""
        state = instance.module.state_dict() if instance.module is not None else {}
        result = ReferenceModel(instance, contract, name, {key: value.detach().clone() for key, value in state.items()})
        arguments = instance.draw(1)
        for evaluating in (False, True):
            result = replace(result, evaluating=evaluating)
            with generators_kept():
                seed_generators(11)
                first = result.eager(arguments)
                seed_generators(12)
                second = result.eager(arguments)
            if all(torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(first, second, strict=True)):
                return replace(result, nesting=parts(result._result(arguments))[1])
        raise ProblemError(f"{name}: the reference draws random numbers, so that no result is the right one")

    def with_state(self, state: Mapping[str, Tensor]) -> ReferenceModel:
        """Return the reference with other parameters."""
        return replace(self, state=dict(state))

    def call(self, arguments: Sequence[Any]) -> Any:
        """Return the reference's results, in the arguments' own arithmetic."""
        module = self.instance.module
        if module is None:
            return self.instance.reference(*arguments)
        module.train(not self.evaluating)
        own = {name: value.clone() if name in _buffers(module) else value for name, value in self.state.items()}
        return functional_call(module, own, tuple(arguments))

    def eager(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Return the results of eager PyTorch as a flat list, called with copies of the arguments."""
        return tensors_of(self._result(arguments))

    def _result(self, arguments: Sequence[Any]) -> Any:
        leaves, structure = tree_flatten(tuple(arguments))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._called(tree_unflatten(copies, structure))

    def _called(self, arguments: Sequence[Any]) -> Any:
        """Return the results of `call` without gradients. Raises `ProblemError` and `ProblemTimeout`."""
        with torch.no_grad(), explaining(self.name, "the reference"):
            return self.call(arguments)

    def is_finite(self, arguments: Sequence[Any]) -> bool:
        """Return whether eager PyTorch's results are all finite."""
        try:
            return all(bool(part.double().isfinite().all()) for part in self.eager(arguments))
        except ProblemError:
            return False

    def writes_to(self, arguments: Sequence[Any]) -> tuple[set[int], set[int]]:
        """Return the indices of the argument tensors that the reference writes to, and of those its results alias."""
        leaves, structure = tree_flatten(tuple(arguments))
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        results = tensors_of(self._called(tree_unflatten(copies, structure)))
        tensors = [(a, b) for a, b in zip(leaves, copies, strict=True) if isinstance(a, Tensor)]
        changed = {index for index, (a, b) in enumerate(tensors) if not torch.equal(a.double(), b.double())}
        own = {part.untyped_storage().data_ptr() for part in results if part.numel()}
        aliased = {index for index, (_, b) in enumerate(tensors) if b.numel() and b.untyped_storage().data_ptr() in own}
        return changed, aliased

    @standard_environment()
    def judge(self, arguments: Sequence[Any], outputs: Sequence[Tensor], nesting: str = "") -> Result:
        """Judge outputs against the golden; ``nesting`` is that of the solution's result, empty if unknown.

        Raises `ProblemError` if the reference can't be evaluated.
        """
        expected = self.eager(arguments)
        case, values = self._case(arguments, expected)
        if finding := _form(case, expected, outputs):
            return Result(case, finding)
        if nesting and nesting != self.nesting:
            words = f"expected results nested as {self.nesting}, got {nesting}"
            return Result(case, Failure("shape", case, words))
        indices = [index for index, part in enumerate(expected) if part.dtype not in _INTEGERS]
        wrong, left_out = self._wrong_integers(case, arguments, expected, outputs)
        unjudged = left_out.total()
        if wrong is not None or not indices:
            nonzero = sum(int(part.count_nonzero()) for part in expected)
            judged = sum(part.numel() for part in expected) - unjudged
            return Result(case, wrong, judged=judged, nonzero=nonzero, left_out=left_out)
        plain = [outputs[index] for index in indices]
        try:
            result = Oracle(self.contract.of(case.definition)).judge(case, values, tuple(plain))
        except Exception as error:
            raise ProblemError(f"{self.name}: the golden can't be evaluated ({one_line(error)})") from error
        return replace(result, left_out=result.left_out + left_out)

    def _wrong_integers(
        self, case: Case, arguments: Sequence[Any], expected: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Failure | None, Counter[tuple[str, str]]]:
        """Return the failure of integer and bool results, and the number of elements that the reference leaves open."""
        left_out: Counter[tuple[str, str]] = Counter()
        pairs = [pair for pair in enumerate(zip(expected, outputs, strict=True)) if pair[1][0].dtype in _INTEGERS]
        if all(torch.equal(right, got) for _, (right, got) in pairs):
            return None, left_out
        with generators_kept():
            open_ = left_open(lambda: self.eager(arguments), expected)
        for position, (right, got) in pairs:
            within = got >= right.min().clamp(max=0) if got.numel() else open_[position]  # no index is negative
            is_wrong = (right != got) & ~(open_[position] & within)
            wrong = is_wrong.nonzero()
            if len(wrong):
                index = tuple(int(part) for part in wrong[0])
                words = f"{len(wrong)} of {right.numel()} elements differ"
                result = (float(got[index]), float(right[index]), 0.0, float("inf"), len(wrong), right.numel())
                return Failure("exact", case, words, f"y{position}", index, *result), left_out
            left_out[f"y{position}", _OPEN] += int((right != got).sum())
        return None, +left_out

    def case(self, arguments: Sequence[Any]) -> Case:
        """Return the case of these arguments, as a report shows it."""
        return self._case(arguments, self.eager(arguments))[0]

    def _case(self, arguments: Sequence[Any], expected: Sequence[Tensor]) -> tuple[Case, dict[str, Tensor]]:
        leaves, structure = tree_flatten(tuple(arguments))
        floating = {
            index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        names = self._names(arguments, floating)
        parameters = {} if floating else {name: v for name, v in self.state.items() if v.is_floating_point()}
        values = dict(zip(names, floating.values(), strict=True))
        values |= {f"p{number}": value for number, value in enumerate(parameters.values())}
        if not values:
            raise ProblemError(f"{self.name}: expected a floating-point tensor among the arguments, got none")

        def reference(*tensors: Tensor) -> Any:
            own = list(leaves)
            model = self
            if floating:
                for index, tensor in zip(floating, tensors, strict=True):
                    own[index] = tensor
            else:
                state = {**self.state, **dict(zip(parameters, tensors, strict=True))}
                model = self.with_state(state)
            results = tensors_of(model.call(tree_unflatten(own, structure)))
            return tuple(results[index] for index in kept)

        if not expected:
            raise ProblemError(f"{self.name}: expected a tensor from the reference, or several; it returned none")
        kept = [index for index, part in enumerate(expected) if part.dtype not in _INTEGERS] or [0]
        takes = ", ".join(f"{name}:{_dtype(value)}[{_dims(value)}]" for name, value in values.items())
        gives = ", ".join(f"y{k}:{_dtype(expected[k])}[{_dims(expected[k])}]" for k in kept)
        definition = reference_spec(reference, f"{takes} -> {gives}", name=self.name)
        sizes = {name: size for name, size in self.instance.sizes.items() if type(size) is int}
        case = Case(definition.qualified_name, sizes, {name: _dtype(value) for name, value in values.items()})
        return case, values

    def _names(self, arguments: Sequence[Any], floating: Mapping[int, Tensor]) -> list[str]:
        """Return names of the floating-point tensors: the reference's parameter names if each argument is a tensor."""
        if all(isinstance(part, Tensor) or not tree_leaves(part) for part in arguments):
            module = self.instance.module
            function: Callable[..., Any] = module.forward if module is not None else self.instance.reference
            known = list(inspect.signature(function).parameters)
            if len(known) >= len(arguments) and all(re.fullmatch(r"[A-Za-z]\w*", name) for name in known):
                return [known[index] for index in floating]
        return [f"x{index}" for index in floating]


def tensors_of(results: Any) -> list[Tensor]:
    """Return the tensors of a result in order; Python numbers become tensors without dimensions."""
    return [
        part if isinstance(part, Tensor) else torch.tensor(part) for part in tree_leaves(results) if part is not None
    ]


def _buffers(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers()}


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dims(tensor: Tensor) -> str:
    return ",".join(map(str, tensor.shape))


def _form(case: Case, expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> Failure | None:
    """Return the failure of the outputs' number, shapes or dtypes."""
    if len(outputs) != len(expected):
        return Failure("shape", case, f"expected {len(expected)} result(s), got {len(outputs)}")
    for index, (right, got) in enumerate(zip(expected, outputs, strict=True)):
        if tuple(got.shape) != tuple(right.shape):
            words = f"expected shape {tuple(right.shape)}, got {tuple(got.shape)}"
            return Failure("shape", case, words, f"y{index}")
        if got.dtype != right.dtype:
            return Failure("dtype", case, f"expected {_dtype(right)}, got {_dtype(got)}", f"y{index}")
    return None
