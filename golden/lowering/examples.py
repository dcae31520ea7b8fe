"""From example inputs to a signature: which sizes are free, which hang together, and what the numbers mean.

Equal sizes are one symbol, if the reference still runs where they change together. What runs is tried on tensors
without numbers (PyTorch's fake ones), or else on real ones. The shapes of the results are fitted to the symbols.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves

from assay.golden.errors import DefinitionError
from assay.golden.lowering.called import Called, title_of
from assay.runtime.output import silent

_SYMBOLS = "BCDEFGHIJKLMNPQRSTUVWXYZ"
_USUAL = (*range(2, 10), 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 192, 255, 256, 257)
_LARGE = 2**22  # elements: above it shapes are tried on tensors without numbers only


@dataclass(frozen=True)
class Example:
    """What example inputs say: the call, its ``tensors`` as a signature's text, sizes that fit, and the first dtype."""

    called: Called
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

    def text(self, usual: torch.dtype) -> str:
        dims = ",".join(str(dim) for dim in self.dims)
        kind = "" if self.value.dtype == usual else f":{str(self.value.dtype).removeprefix('torch.')}"
        return f"{self.name}{kind}[{dims}]{self.role}"


def example_of(reference: Callable[..., Any], inputs: Callable[[], Any]) -> Example:
    """The example that ``inputs()`` makes: a tuple or list of arguments, or one tensor. Raises `DefinitionError`.

    What the reference prints or warns while sizes are tried is dropped.
    """
    given = inputs()
    args = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    leaves, tree = tree_flatten(args)
    varied = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _can_vary(leaf)]
    module = reference if isinstance(reference, torch.nn.Module) else None
    state = {} if module is None else {n: t for n, t in _state(module) if t.is_floating_point()}
    called = Called(reference, tuple(leaves), tree, tuple(varied), tuple(state), (), title_of(reference))
    names = _names(reference, args, leaves, varied)
    tensors = [_Tensor(name, leaves[place]) for name, place in zip(names, varied, strict=True)]
    tensors += [_Tensor(_identifier(name, [t.name for t in tensors]), t.detach()) for name, t in state.items()]
    if not tensors:
        raise DefinitionError("inputs: expected at least one tensor of numbers among the arguments that it gives")
    usual = next((t.value.dtype for t in tensors if t.value.is_floating_point()), torch.float32)
    with silent():
        shapes, sizes, multiples = _symbolic(called, tensors)
        for tensor in tensors:
            tensor.role = _role(tensor)
        _positive(called, tensors, sizes)
        allowed = _allowed(called, tensors, sizes, multiples)
    results = ", ".join(f"out{place or ''}{_kind(leaf, usual)}[{dims}]" for place, (leaf, dims) in enumerate(shapes))
    text = f"{', '.join(tensor.text(usual) for tensor in tensors)} -> {results}"
    plain = not state and len(varied) == len(leaves) == len(args)
    return Example(called, text, sizes, multiples, allowed, str(usual).removeprefix("torch."), plain)


def _state(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _can_vary(tensor: torch.Tensor) -> bool:
    return tensor.dtype not in (torch.bool, torch.uint8) and not tensor.is_complex()


def _kind(leaf: torch.Tensor, usual: torch.dtype) -> str:
    if leaf.dtype == usual:
        return ""
    return f":{str(leaf.dtype if leaf.is_floating_point() else torch.int64).removeprefix('torch.')}"


def _identifier(name: str, taken: Sequence[str]) -> str:
    made = "".join(char if char.isalnum() else "_" for char in name)
    made = made if made[:1].isalpha() else f"p{made}"
    return made if made not in taken else f"{made}_"


def _names(reference: Any, args: Sequence[Any], leaves: Sequence[Any], varied: Sequence[int]) -> list[str]:
    """Names of the tensors: those of the reference's parameters, numbered where one holds several."""
    import inspect

    function = reference.forward if isinstance(reference, torch.nn.Module) else reference
    try:
        own = [p.name for p in inspect.signature(function).parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD]
    except (TypeError, ValueError):
        own = []
    names: list[str] = []
    place = 0
    for order, arg in enumerate(args):
        count = len(tree_leaves(arg))
        title = own[order] if order < len(own) else f"x{order}"
        for inner in range(count):
            if place in varied:
                names.append(_identifier(title if count == 1 else f"{title}{inner}", names))
            place += 1
    return names


@contextmanager
def _fake() -> Iterator[FakeTensorMode]:
    """A mode in which tensors have shapes alone; what PyTorch logs of those that a reference refuses is not shown."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        with torch.no_grad():
            yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        log.disabled = was


def _shapes(called: Called, tensors: Sequence[_Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor] | None:
    """The results for tensors of these shapes, without numbers if that can be; None where the reference refuses."""
    try:
        with _fake() as mode, mode:
            made = [torch.empty(tuple(s), dtype=t.value.dtype) for t, s in zip(tensors, shapes, strict=True)]
            return [leaf for leaf in tree_leaves(called(*made)) if isinstance(leaf, torch.Tensor)]
    except Exception:  # whatever PyTorch or the reference says of these sizes
        if sum(math.prod(shape) for shape in shapes) > _LARGE:
            return None
    try:
        real = [_filled(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        with torch.no_grad():
            return [leaf for leaf in tree_leaves(called(*real)) if isinstance(leaf, torch.Tensor)]
    except Exception:
        return None


def _filled(tensor: _Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Numbers of the example, again and again, in another shape."""
    flat = tensor.value.detach().reshape(-1)
    count = math.prod(shape)
    return (
        flat.repeat(-(-count // max(flat.numel(), 1)))[:count].reshape(tuple(shape))
        if count
        else flat[:0].reshape(shape)
    )


def _symbolic(
    called: Called, tensors: Sequence[_Tensor]
) -> tuple[list[tuple[torch.Tensor, str]], dict[str, int], dict[str, str]]:
    """Dimensions of tensors as symbols where they may change; the results with theirs, sizes, and steps of symbols."""
    given = [list(tensor.value.shape) for tensor in tensors]
    base = _shapes(called, tensors, given)
    if base is None:
        made = called(*[tensor.value for tensor in tensors])  # its own error says why
        base = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    symbols: dict[int, str] = {}
    sizes: dict[str, int] = {}
    multiples: dict[str, str] = {}
    samples: dict[str, list[tuple[int, list[torch.Tensor]]]] = {}
    for size in dict.fromkeys(n for shape in given for n in shape):
        if size <= 1 or len(symbols) == len(_SYMBOLS):
            continue
        for step in (1, _even_step(size), size):
            tried = [max(step, size - step), size + step, size + 2 * step]
            found = [(n, _shapes(called, tensors, _changed(given, size, n))) for n in dict.fromkeys(tried) if n != size]
            known = [(n, results) for n, results in found if results is not None]
            if len(known) == len(found) and all(_fits(base, results) for _, results in known):
                name = _SYMBOLS[len(symbols)]
                symbols[size], sizes[name] = name, size
                samples[name] = [(n, results) for n, results in known]
                if step > 1:
                    multiples[name] = str(step)
                break
    for tensor, shape in zip(tensors, given, strict=True):
        tensor.dims = [symbols.get(n, n) for n in shape]
    results, lost = _results(base, sizes, samples)
    while lost:  # a result's size that no expression gives: what it hangs on stays as it is
        for tensor in tensors:
            tensor.dims = [sizes[d] if isinstance(d, str) and d in lost else d for d in tensor.dims]
        sizes = {name: size for name, size in sizes.items() if name not in lost}
        results, lost = _results(base, sizes, samples)
    return results, sizes, {name: step for name, step in multiples.items() if name in sizes}


def _allowed(
    called: Called, tensors: Sequence[_Tensor], sizes: Mapping[str, int], multiples: Mapping[str, str]
) -> dict[str, Sequence[int]]:
    """Of symbols that may not be as small as one step, sizes that the reference runs with."""
    found: dict[str, Sequence[int]] = {}
    for symbol in sizes:
        step = int(multiples.get(symbol, "1"))

        def runs(size: int, symbol: str = symbol) -> bool:
            shapes = [
                [size if d == symbol else sizes[d] if isinstance(d, str) else d for d in tensor.dims]
                for tensor in tensors
            ]
            return _shapes(called, tensors, shapes) is not None

        if not runs(step):
            found[symbol] = tuple(size for size in _USUAL if size % step == 0 and runs(size)) or (sizes[symbol],)
    return found


def _even_step(size: int) -> int:
    """The largest power of two that divides a size, a half of it at most."""
    step = size & -size
    return step if step < size else max(size // 2, 1)


def _changed(given: Sequence[Sequence[int]], size: int, to: int) -> list[list[int]]:
    return [[to if n == size else n for n in shape] for shape in given]


def _fits(base: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> bool:
    return len(base) == len(results) and all(a.ndim == b.ndim for a, b in zip(base, results, strict=True))


def _results(
    base: Sequence[torch.Tensor],
    sizes: Mapping[str, int],
    samples: Mapping[str, list[tuple[int, list[torch.Tensor]]]],
) -> tuple[list[tuple[torch.Tensor, str]], set[str]]:
    """The results with their dimensions as expressions, and the symbols of those that none fits."""
    found, lost = [], set()
    for place, result in enumerate(base):
        dims = []
        for axis, size in enumerate(result.shape):
            moved = {name: [(n, int(results[place].shape[axis])) for n, results in samples[name]] for name in sizes}
            text, open_symbols = _expression(int(size), moved, sizes)
            dims.append(text)
            lost |= open_symbols
        found.append((result, ",".join(dims)))
    return found, lost


def _expression(
    size: int, moved: Mapping[str, list[tuple[int, int]]], sizes: Mapping[str, int]
) -> tuple[str, set[str]]:
    """A dimension in terms of the one symbol, or the product of two, that it changes with."""
    on = [name for name, pairs in moved.items() if any(value != size for _, value in pairs)]
    if not on:
        return str(size), set()
    for name in on[:1] if len(on) == 1 else []:
        pairs = [(sizes[name], size), *moved[name]]
        for text, function in _forms(name, pairs[0]):
            if all(function(n) == value for n, value in pairs):
                return text, set()
    if len(on) == 2:
        one, two = on
        whole = sizes[one] * sizes[two]
        factor = size // whole if whole and size % whole == 0 else 0
        if (
            factor
            and all(v == factor * n * sizes[two] for n, v in moved[one])
            and all(v == factor * n * sizes[one] for n, v in moved[two])
        ):
            return f"{one}*{two}" if factor == 1 else f"{factor}*{one}*{two}", set()
        if size == sizes[one] + sizes[two] and all(v == n + sizes[two] for n, v in moved[one]):
            return f"{one}+{two}", set()
    if len(on) > 1:
        return str(size), {min(on, key=lambda name: sizes[name])}
    return str(size), set(on)


def _forms(name: str, at: tuple[int, int]) -> Iterator[tuple[str, Callable[[int], int | None]]]:
    """Expressions in one symbol that pass through a point: n, n + c, k n, k n + c, n / k, ceil of quotients."""
    n, value = at
    yield name, lambda x: x
    shift = value - n
    yield f"{name}{shift:+d}", lambda x: x + shift
    if value % n == 0:
        factor = value // n
        yield f"{factor}*{name}", lambda x: factor * x
    for factor in range(2, 5):
        rest = value - factor * n
        yield f"{factor}*{name}{rest:+d}", lambda x, factor=factor, rest=rest: factor * x + rest  # type: ignore[misc]
    for below in range(2, 17):
        if n % below == 0 and value == n // below:
            yield f"{name}/{below}", lambda x, below=below: x // below if x % below == 0 else None  # type: ignore[misc]
        for add in range(-below, below + 1):
            if value == -(-(n + add) // below):
                yield (
                    f"ceil(({name}{add:+d})/{below})",
                    lambda x, below=below, add=add: -(-(x + add) // below),  # type: ignore[misc]
                )


def _role(tensor: _Tensor) -> str:
    """What integers are: below one more than the largest that was seen. Variances are positive."""
    value = tensor.value
    if value.is_floating_point():
        return "=slope" if tensor.name.endswith("var") and bool((value >= 0).all()) else ""
    most = int(value.max()) + 1 if value.numel() else 1
    return f"=code({max(most, 1)})"


def _positive(called: Called, tensors: Sequence[_Tensor], sizes: Mapping[str, int]) -> None:
    """Tensors without negative numbers stay so where the reference refuses such, or makes NaN of them."""
    shapes = [
        [min(n, sizes.get(d, n)) if isinstance(d, str) else d for n, d in zip(t.value.shape, t.dims, strict=True)]
        for t in tensors
    ]
    if sum(math.prod(shape) for shape in shapes) > _LARGE:
        return
    candidates = [t for t in tensors if t.value.is_floating_point() and not t.role and bool((t.value >= 0).all())]
    for some in itertools.chain([()], ((t,) for t in candidates), [tuple(candidates)]):
        generator = torch.Generator().manual_seed(0)
        made = []
        for tensor in tensors:
            x = tensor.value.detach()
            if x.is_floating_point() and not tensor.role and not any(tensor is t for t in some):
                x = torch.randn(x.shape, generator=generator).to(x.dtype)
            made.append(x)
        try:
            with torch.no_grad():
                found = [leaf for leaf in tree_leaves(called(*made)) if isinstance(leaf, torch.Tensor)]
        except Exception:
            continue
        if not any(bool(leaf.isnan().any()) for leaf in found if leaf.is_floating_point()):
            for tensor in some:
                tensor.role = "=weight" if bool((tensor.value <= 1).all()) else "=slope"
            return
