"""`reference_spec`: a PyTorch function, a module, or several forms of one function, as a `Spec`.

A reference that can be imported names its spec: ``module:function(tensors)``, or ``module:one|module:other(tensors)``
of several forms. Any process makes the spec anew from that name, so repro lines, stores and campaigns need no more.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from assay.golden.arithmetic import Arithmetic, BallArithmetic
from assay.golden.errors import DefinitionError, Undecided, UnknownSpec
from assay.golden.inputs.values import INTEGERS
from assay.golden.lowering.called import Called
from assay.golden.lowering.conditioning import Watched, remarks
from assay.golden.lowering.evaluation import Evaluation, branches
from assay.golden.lowering.frameworks import in_torch
from assay.golden.lowering.tensor import NumberTensor, read
from assay.golden.options import Option
from assay.golden.registry import Sizes, Spec, register
from assay.golden.signature import parse
from assay.runtime.errors import AssayError
from assay.runtime.modules import import_users_module
from assay.runtime.source import source_of

NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
STAGES: Mapping[str, str | None] = {
    **{name: name for name in NARROW},
    "eager_bfloat16": None,
    "eager_float16": None,
    "exponentials": None,
    "normalizer": None,
    "query": None,
    "scores": None,
    "probabilities": "input",
}
"""Roundings that a kernel may make: casts of the reference by their formats, what enters products in the inputs' 16-bit
dtype, the weights of attention; and, under the contract "torch", what eager mode rounds between operations."""

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Definition:
    """The definition that a reference is, over any arithmetic: of numbers, their dtypes, and options."""

    name: str
    forms: tuple[Reference, ...]
    evaluation: Callable[..., Evaluation] = Evaluation

    def __post_init__(self) -> None:
        own = getattr(self.forms[0], "__module__", None) or "__main__"
        object.__setattr__(self, "__module__", own)  # as of a function, which a definition usually is

    def __call__(self, xp: Arithmetic, *numbers: Any, dtypes: Sequence[torch.dtype], **options: Any) -> Any:
        try:
            return self._evaluated(xp, numbers, dtypes, options)
        except (AssayError, MemoryError):
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(map(int, number.shape))) for number in numbers)
            raise DefinitionError(
                f"{self.name} raised {type(error).__name__} for tensors of shapes {shapes}: "
                f"{' '.join(str(error).split())[:300]}; restrict sizes by shapes=, or tie them ('8*D')"
            ) from error

    def remarks(
        self, xp: BallArithmetic, numbers: Sequence[Any], dtypes: Sequence[torch.dtype], options: Mapping[str, Any]
    ) -> list[str]:
        """Where the first form is ill-conditioned on these numbers, and what that costs, in words."""
        evaluation = Watched(xp, _operands(dtypes))
        results = _run(self.forms[0], evaluation, numbers, dtypes, options)
        return remarks(evaluation.losses, results, xp.u)

    def _evaluated(
        self, xp: Arithmetic, numbers: Sequence[Any], dtypes: Sequence[torch.dtype], options: Mapping[str, Any]
    ) -> Any:
        operands = _operands(dtypes)
        first, *others = (
            _results(form, xp, numbers, dtypes, operands, options, self.evaluation) for form in self.forms
        )
        for form, other in zip(self.forms[1:], others, strict=True):
            self._compare(xp, first, other, form)
        if not others:
            return first
        return tuple(
            xp.any_formula(*(lambda number=number: number for number in numbers))
            if not _is_plain(numbers[0])
            else numbers[0]
            for numbers in zip(first, *others, strict=True)
        )

    def _compare(self, xp: Arithmetic, first: Sequence[Any], other: Sequence[Any], form: Reference) -> None:
        """`DefinitionError` where a form is certainly another function than the first."""
        if len(first) != len(other):
            raise DefinitionError(f"{self.name}: {_name(form)} gives {len(other)} results, the first form {len(first)}")
        for one, two in zip(first, other, strict=True):
            if tuple(one.shape) != tuple(two.shape):
                shapes = f"{tuple(two.shape)}, the first form {tuple(one.shape)}"
                raise DefinitionError(f"{self.name}: {_name(form)} gives a result of shape {shapes}")
            if _is_plain(one) or _is_plain(two):
                continue
            order = xp.compare(one, two)
            apart = order.less | order.more
            if bool(apart.any()):
                place = tuple(int(i) for i in apart.nonzero()[0])
                raise DefinitionError(
                    f"{self.name}: {_name(form)} is another function than the first form: results differ at "
                    f"{list(place)}, {int(apart.sum())} of {apart.numel()} elements"
                )


def _is_plain(result: Any) -> bool:
    return isinstance(result, torch.Tensor) or getattr(result, "dtype", object) not in (object, None)


def _operands(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The 16-bit dtype of the inputs, to which kernels round what enters products; None where there is none."""
    return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), None)


def _run(
    form: Reference,
    evaluation: Evaluation,
    numbers: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    options: Mapping[str, Any],
) -> tuple[Any, ...]:
    """The results of one run, in the arithmetic's numbers."""
    tensors = [_tensor(evaluation, number, dtype) for number, dtype in zip(numbers, dtypes, strict=True)]
    with _plain_kernels(), evaluation:
        found = form(*tensors, **options)
    return tuple(_number(evaluation, leaf) for leaf in tree_leaves(found) if leaf is not None)


def _results(
    form: Reference,
    xp: Any,
    numbers: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    operands: torch.dtype | None,
    options: Mapping[str, Any],
    make: Callable[..., Evaluation],
) -> tuple[Any, ...]:
    """The results of a reference in the arithmetic's numbers, under all admissible answers to what it asks."""

    found = branches(lambda evaluation: _run(form, evaluation, numbers, dtypes, options), xp, operands, make)
    return found[0] if len(found) == 1 else tuple(_hull(xp, parts) for parts in zip(*found, strict=True))


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Without oneDNN, whose fused layers have no lowering rule."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _tensor(evaluation: Evaluation, number: Any, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return evaluation.made(number, dtype, "")
    return torch.as_tensor(number).to(dtype)


def _number(evaluation: Evaluation, leaf: Any) -> Any:
    """A result as the arithmetic has it: numbers before their last rounding, which is the kernel's own."""
    if isinstance(leaf, NumberTensor):
        number = read(leaf, unrounded=True)
        return evaluation.xp.open_beyond(number) if evaluation.overflowed and not leaf.box.as_operand else number
    if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():
        return evaluation.xp.integers(leaf)
    return evaluation.xp.exact(leaf if not isinstance(leaf, torch.Tensor) else leaf.detach().double())


def _hull(xp: Any, parts: Sequence[Any]) -> Any:
    """One number that may be any of several."""
    if any(tuple(part.shape) != tuple(parts[0].shape) for part in parts):
        raise Undecided("the shapes of the reference's results hang on a choice that rounding leaves open")
    parts = [xp.exact(part) if _is_plain(part) else part for part in parts]
    found = parts[0]
    for part in parts[1:]:
        found = xp.hull(found, part)
    return found


def reference_spec(
    reference: Reference | Sequence[Reference],
    tensors: str,
    *,
    multiples: Mapping[str, str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Spec:
    """The spec of a reference: a function, a module, or a list of such, forms of one function.

    ``tensors`` are what it takes by position and gives, in the grammar of `define`
    (``"x[T,D], weight[D] -> y[T,D]"``), ``multiples`` what sizes must be multiples of, ``sizes`` those that
    a symbol may have; ``options`` are defaults of keywords beyond those of its own signature, and
    ``name`` is what reports call it. The same reference and text give the same spec. Raises `DefinitionError`.
    """
    forms = tuple(reference) if isinstance(reference, (list, tuple)) else (reference,)
    for form in forms:
        if not callable(form):
            raise DefinitionError(f"reference: expected a function or a module, got {type(form).__name__}")
    text = " ".join(tensors.split())
    try:
        signature = parse(with_roles(text))
    except ValueError as error:
        raise DefinitionError(f"tensors={tensors!r}: {error}") from None
    for tensor in signature.tensors:
        if tensor.dtype in INTEGERS and not tensor.is_integer:
            raise DefinitionError(
                f"tensors={tensors!r}: {tensor.name} are integers of which nothing is said; expected a role: "
                f"{tensor.name}:{tensor.dtype}[...]=index(V) for those below a size V, =code(10) for those below 10"
            )
    if not signature.returns:
        raise DefinitionError(f"tensors={tensors!r}: expected what the reference gives too, e.g. 'x[T,D] -> y[T,D]'")
    title = name or _name(forms[0])
    addresses = [_address(form) for form in forms]
    called = f"{'|'.join(addresses)}({text})" if all(addresses) else f"{title}({text})"
    own = options_of(forms[0], len([t for t in signature.tensors if not t.keyword]))
    return register(
        Spec(
            title,
            Definition(title, tuple(map(in_torch, forms))),
            with_roles(text),
            options={**own, **{key: _option(value) for key, value in (options or {}).items()}},
            stages=STAGES,
            version=version_of(forms),
            public=False,
            sizes=Sizes({symbol: tuple(allowed) for symbol, allowed in (sizes or {}).items()}, multiples or {}),
            import_name=called,
            needs_dtypes=True,
        )
    )


def with_roles(text: str) -> str:
    """``text`` where a mask among the inputs is ``code(2)``, and integers among the results are numbers like others."""
    given, arrow, results = text.partition("->")
    given = re.sub(r"(:bool\[[^\]]*\])(?!=)", r"\1=code(2)", given)
    return given + arrow + re.sub(r"(:(?:bool|int\d+)\[[^\]]*\])=\w+(\([^)]*\))?", r"\1", results)


def named(name: str) -> Spec:
    """The spec that a name made by `reference_spec` says, in any process; `UnknownSpec` or `DefinitionError`."""
    target, _, text = name.partition("(")
    if ":" not in target or not text.endswith(")"):
        raise UnknownSpec(f"reference {name!r}; expected module:function(tensors), as an importable reference has it")
    return reference_spec([_imported(address) for address in target.split("|")], text[:-1])


def _imported(address: str) -> Reference:
    module, _, path = address.partition(":")
    import_users_module(module, f"reference {address!r}", DefinitionError)
    found: Any = import_module(module)
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise DefinitionError(f"reference {address!r}: {module} has no {path}") from None
    return found


def _name(form: Reference) -> str:
    return getattr(form, "__name__", None) or type(form).__name__


def _address(form: Reference) -> str:
    """``module:name`` of a function that can be imported by it; else nothing."""
    module, path = getattr(form, "__module__", None), getattr(form, "__qualname__", None)
    if not module or not path or module == "__main__" or "<" in path:
        return ""
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return ""
    return f"{module}:{path}" if found is form else ""


def options_of(form: Reference, tensors: int) -> dict[str, Option]:
    """The keywords that a reference has beyond its tensors, with their defaults."""
    if isinstance(form, Called):
        return {}
    function = form.forward if isinstance(form, torch.nn.Module) else form
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    plain = (bool, int, float, str, tuple, type(None))
    return {
        p.name: _option(p.default)
        for p in parameters[tensors:]
        if p.default is not p.empty and isinstance(p.default, plain)
    }


def _option(default: Any) -> Option:
    return Option(default, lambda value: True, "anything that the reference takes")


def version_of(forms: Sequence[Reference]) -> int:
    """A number of the references' source: goldens of another text don't count."""
    targets = [form.target if isinstance(form, Called) else form for form in forms]
    return zlib.crc32("".join(source_of(target) for target in targets).encode())
