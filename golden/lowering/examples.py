"""From example inputs to a signature: which sizes are free, which are tied, and what the elements mean.

Equal sizes become one symbol if the reference still runs where they change together. That is tried on fake tensors,
which have no elements, or else on real ones. The shapes of the results are fitted to the symbols.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from assay.golden.errors import DefinitionError
from assay.golden.result_shapes import expression_of
from assay.runtime.output import silent

_SYMBOLS = "BCDEFGHIJKLMNPQRSTUVWXYZ"
_TYPICAL_SIZES = (*range(2, 10), 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257)
_MAX_REAL = 2**22  # elements above which shapes are tried on fake tensors only


@dataclass(frozen=True, eq=False)
class TensorCall:
    """A reference or a kernel as a function of tensors alone; its other arguments are those of the example.

    ``positions`` are the tensors' indices among the flattened arguments. ``state`` names the parameters and buffers of
    a module that are tensors too, after those of the arguments. Whatever else a module holds, and what the call changes
    in it, is restored afterwards.
    """

    target: Callable[..., Any]
    leaves: tuple[Any, ...]
    tree: Any
    positions: tuple[int, ...]
    state: tuple[str, ...] = ()
    __name__: str = ""

    def __eq__(self, other: object) -> bool:
        """Whether both are the same call; fixed tensors are compared by value."""
        if not isinstance(other, TensorCall) or len(self.leaves) != len(other.leaves):
            return False
        facts = (self.target, self.tree, self.positions, self.state)
        if facts != (other.target, other.tree, other.positions, other.state):
            return False
        for position in set(range(len(self.leaves))) - set(self.positions):
            one, two = self.leaves[position], other.leaves[position]
            if not isinstance(one, torch.Tensor):
                if isinstance(two, torch.Tensor) or one != two:
                    return False
            elif not isinstance(two, torch.Tensor) or one.dtype != two.dtype or not torch.equal(one, two):
                return False
        return True

    def __hash__(self) -> int:
        return hash((self.target, self.positions, self.state))

    def __call__(self, *tensors: Any, **options: Any) -> Any:
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=False):
            leaves[position] = tensor
        args = tree_unflatten(leaves, self.tree)
        if not isinstance(self.target, torch.nn.Module):
            return self.target(*args, **options)
        buffers = {name: buffer.clone() for name, buffer in self.target.named_buffers() if name not in self.state}
        state = zip(self.state, tensors[len(self.positions) :], strict=True)
        overrides = {**buffers, **{name: tensor.clone() for name, tensor in state}}
        return torch.func.functional_call(self.target, overrides, tuple(args), options)

    def with_target(self, target: Callable[..., Any]) -> TensorCall:
        """Return the same call of another function or module. Raise `DefinitionError` if that lacks a parameter."""
        if isinstance(self.target, torch.nn.Module) and not isinstance(target, torch.nn.Module) and self.state:
            raise DefinitionError(f"kernel: expected a module with the reference's parameters {', '.join(self.state)}")
        if isinstance(target, torch.nn.Module):
            shapes = {name: tuple(tensor.shape) for name, tensor in _state(target)}
            own = {name: tuple(tensor.shape) for name, tensor in _state(self.target)}
            for name in self.state:
                if shapes.get(name) != own[name]:
                    has = shapes.get(name, "none")
                    raise DefinitionError(
                        f"kernel: the reference's parameter {name} is {own[name]}, the kernel has {has}"
                    )
            for name, _ in target.named_parameters():
                if name not in own and isinstance(self.target, torch.nn.Module):
                    raise DefinitionError(f"kernel: it has a parameter {name} that the reference lacks")
        return TensorCall(target, self.leaves, self.tree, self.positions, self.state, title_of(target))


def title_of(target: Any) -> str:
    """Return the name of a function or a module for reports."""
    return getattr(target, "__name__", None) or type(target).__name__


@dataclass(frozen=True)
class Example:
    """What example inputs say of a reference.

    ``text`` is the signature of the tensors, ``sizes`` those of the example, ``multiples`` and ``allowed`` limit the
    sizes of a symbol, and ``dtype`` is that of the first floating-point tensor. ``plain``: all arguments are tensors,
    and there is no state.
    """

    call: TensorCall
    text: str
    sizes: Mapping[str, int]
    multiples: Mapping[str, str]
    allowed: Mapping[str, Sequence[int]]
    dtype: str
    plain: bool = False


@dataclass
class _Tensor:
    name: str
    value: torch.Tensor
    dims: list[str | int] = field(default_factory=list)
    role: str = ""

    def text(self, default: torch.dtype) -> str:
        dims = ",".join(str(dim) for dim in self.dims)
        return f"{self.name}{_kind(self.value.dtype, default)}[{dims}]{self.role}"

    def shape(self, sizes: Mapping[str, int]) -> list[int]:
        return [sizes[dim] if isinstance(dim, str) else dim for dim in self.dims]


def example_of(reference: Callable[..., Any], inputs: Callable[[], Any]) -> Example:
    """Return the example that ``inputs()`` makes: a tuple or list of arguments, or one tensor.

    Output and warnings of the reference while sizes are tried are dropped. Raises `DefinitionError`.
    """
    example = inputs()
    args = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    leaves, tree = tree_flatten(args)
    varied = [
        position
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.dtype not in (torch.bool, torch.uint8) and not leaf.is_complex()
    ]
    state = {name: tensor for name, tensor in _state(reference) if tensor.is_floating_point()}
    call = TensorCall(reference, tuple(leaves), tree, tuple(varied), tuple(state), title_of(reference))
    names = _names(reference, args, varied)
    tensors = [_Tensor(name, leaves[position]) for name, position in zip(names, varied, strict=True)]
    tensors += [_Tensor(_identifier(name, [t.name for t in tensors]), t.detach()) for name, t in state.items()]
    if not tensors:
        raise DefinitionError("inputs: expected at least one tensor of numbers among the arguments that it gives")
    default = next((t.value.dtype for t in tensors if t.value.is_floating_point()), torch.float32)
    with silent():
        shapes, sizes, multiples = _symbolic(call, tensors)
        for tensor in tensors:
            tensor.role = _role(tensor)
        _restrict_signs(call, tensors, sizes)
        allowed = _allowed(call, tensors, sizes, multiples)
    dtypes = [leaf.dtype if leaf.dtype == default or leaf.is_floating_point() else torch.int64 for leaf, _ in shapes]
    results = ", ".join(
        f"out{number or ''}{_kind(dtype, default)}[{dims}]"
        for number, (dtype, (_, dims)) in enumerate(zip(dtypes, shapes, strict=True))
    )
    text = f"{', '.join(tensor.text(default) for tensor in tensors)} -> {results}"
    plain = not state and len(varied) == len(leaves) == len(args)
    return Example(call, text, sizes, multiples, allowed, str(default).removeprefix("torch."), plain)


def _state(target: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(target, torch.nn.Module):
        yield from target.named_parameters()
        yield from target.named_buffers()


def _kind(dtype: torch.dtype, default: torch.dtype) -> str:
    return "" if dtype == default else f":{str(dtype).removeprefix('torch.')}"


def _identifier(name: str, taken: Sequence[str]) -> str:
    identifier = "".join(char if char.isalnum() else "_" for char in name)
    identifier = identifier if identifier[:1].isalpha() else f"p{identifier}"
    return identifier if identifier not in taken else f"{identifier}_"


def _names(reference: Any, args: Sequence[Any], varied: Sequence[int]) -> list[str]:
    """Name the tensors after the reference's parameters, numbered where one holds several."""
    function = reference.forward if isinstance(reference, torch.nn.Module) else reference
    try:
        signature = inspect.signature(function)
        parameters = [p.name for p in signature.parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    position = 0
    for order, arg in enumerate(args):
        count = len(tree_leaves(arg))
        title = parameters[order] if order < len(parameters) else f"x{order}"
        for number in range(count):
            if position in varied:
                names.append(_identifier(title if count == 1 else f"{title}{number}", names))
            position += 1
    return names


@contextmanager
def _fake() -> Iterator[FakeTensorMode]:
    """Make fake tensors, without PyTorch's log lines about any that a reference refuses."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        with torch.no_grad():
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        log.disabled = was


def _tensors_in(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _run(call: TensorCall, tensors: Sequence[_Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
    """Return the results for tensors of these shapes, fake ones if possible; None if the reference refuses."""
    try:
        with _fake() as mode, mode:
            fakes = [torch.empty(tuple(s), dtype=t.value.dtype) for t, s in zip(tensors, shapes, strict=True)]
            return _tensors_in(call(*fakes))
    except Exception:  # PyTorch and the reference may raise anything for these sizes
        if sum(math.prod(shape) for shape in shapes) > _MAX_REAL:
            return None
    try:
        reals = []
        for tensor, shape in zip(tensors, shapes, strict=True):  # the elements of the example, repeated
            flat, count = tensor.value.detach().reshape(-1), math.prod(shape)
            reals.append(flat.repeat(-(-count // max(flat.numel(), 1)))[:count].reshape(tuple(shape)))
        with torch.no_grad():
            return _tensors_in(call(*reals))
    except Exception:
        return None


_Samples = Mapping[str, list[tuple[int, list[torch.Tensor]]]]  # of each symbol: other sizes, and the results there


def _symbolic(
    call: TensorCall, tensors: Sequence[_Tensor]
) -> tuple[list[tuple[torch.Tensor, str]], dict[str, int], dict[str, str]]:
    """Make dimensions of ``tensors`` symbols where they may change.

    Return the results with their dimensions, the size of each symbol, and of what it must be a multiple.
    """
    shapes = [list(tensor.value.shape) for tensor in tensors]
    base = _run(call, tensors, shapes)
    if base is None:
        base = _tensors_in(call(*[tensor.value for tensor in tensors]))  # raises the reference's own error
    symbols: dict[int, str] = {}
    sizes: dict[str, int] = {}
    multiples: dict[str, str] = {}
    samples: dict[str, list[tuple[int, list[torch.Tensor]]]] = {}
    for size in dict.fromkeys(n for shape in shapes for n in shape):
        if size <= 1 or len(symbols) == len(_SYMBOLS):
            continue
        even = size & -size  # the largest power of two that divides it, at most half of it
        for step in (1, even if even < size else max(size // 2, 1), size):
            others = [n for n in dict.fromkeys((max(step, size - step), size + step, size + 2 * step)) if n != size]
            runs = [(n, _run(call, tensors, [[n if m == size else m for m in s] for s in shapes])) for n in others]
            done = [(n, results) for n, results in runs if results is not None]
            ranks = [[leaf.ndim for leaf in results] for results in (base, *(results for _, results in done))]
            if len(done) == len(runs) and all(other == ranks[0] for other in ranks):
                name = _SYMBOLS[len(symbols)]
                symbols[size], sizes[name], samples[name] = name, size, done
                if step > 1:
                    multiples[name] = str(step)
                break
    for tensor, shape in zip(tensors, shapes, strict=True):
        tensor.dims = [symbols.get(n, n) for n in shape]
    results, lost = _results(base, sizes, samples)
    while lost:  # no expression gives the size of a result: the symbols that it depends on become fixed sizes
        for tensor in tensors:
            tensor.dims = [sizes[d] if isinstance(d, str) and d in lost else d for d in tensor.dims]
        sizes = {name: size for name, size in sizes.items() if name not in lost}
        results, lost = _results(base, sizes, samples)
    return results, sizes, {name: step for name, step in multiples.items() if name in sizes}


def _allowed(
    call: TensorCall, tensors: Sequence[_Tensor], sizes: Mapping[str, int], multiples: Mapping[str, str]
) -> dict[str, Sequence[int]]:
    """Return sizes that the reference runs with, of symbols that may not be as small as one step."""

    def runs(symbol: str, size: int) -> bool:
        return _run(call, tensors, [tensor.shape({**sizes, symbol: size}) for tensor in tensors]) is not None

    allowed: dict[str, Sequence[int]] = {}
    for symbol in sizes:
        step = int(multiples.get(symbol, "1"))
        if not runs(symbol, step):
            typical = tuple(size for size in _TYPICAL_SIZES if size % step == 0 and runs(symbol, size))
            allowed[symbol] = typical or (sizes[symbol],)
    return allowed


def _results(
    base: Sequence[torch.Tensor], sizes: Mapping[str, int], samples: _Samples
) -> tuple[list[tuple[torch.Tensor, str]], set[str]]:
    """Return the results with their dimensions as expressions, and the symbols of sizes that no expression fits."""
    results, lost = [], set()
    for number, result in enumerate(base):
        dims = []
        for axis, size in enumerate(result.shape):
            pairs = {name: [(n, int(other[number].shape[axis])) for n, other in samples[name]] for name in sizes}
            text, unfitted = expression_of(int(size), pairs, sizes)
            dims.append(text)
            lost |= unfitted
        results.append((result, ",".join(dims)))
    return results, lost


def _role(tensor: _Tensor) -> str:
    """Return the role of a tensor: integers are codes below one more than their maximum, variances are positive."""
    value = tensor.value
    if value.is_floating_point():
        return "=slope" if tensor.name.endswith("var") and bool((value >= 0).all()) else ""
    return f"=code({max(int(value.max()) + 1 if value.numel() else 1, 1)})"


def _restrict_signs(call: TensorCall, tensors: Sequence[_Tensor], sizes: Mapping[str, int]) -> None:
    """Keep tensors without negative elements so if the reference refuses negative ones or returns NaN for them."""
    shapes = [
        [min(n, sizes.get(d, n)) if isinstance(d, str) else d for n, d in zip(t.value.shape, t.dims, strict=True)]
        for t in tensors
    ]
    if sum(math.prod(shape) for shape in shapes) > _MAX_REAL:
        return
    candidates = [t for t in tensors if t.value.is_floating_point() and not t.role and bool((t.value >= 0).all())]
    for restricted in itertools.chain([()], ((t,) for t in candidates), [tuple(candidates)]):
        generator = torch.Generator().manual_seed(0)
        args = []
        for tensor in tensors:
            x = tensor.value.detach()
            if x.is_floating_point() and not tensor.role and not any(tensor is t for t in restricted):
                x = torch.randn(x.shape, generator=generator).to(x.dtype)
            args.append(x)
        try:
            with torch.no_grad():
                results = _tensors_in(call(*args))
        except Exception:
            continue
        if not any(bool(leaf.isnan().any()) for leaf in results if leaf.is_floating_point()):
            for tensor in restricted:
                tensor.role = "=weight" if bool((tensor.value <= 1).all()) else "=slope"
            return
