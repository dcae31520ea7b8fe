"""`reference_spec` and `define_torch`: a PyTorch function, a module, or several forms of one function, as a `Spec`.

A reference that can be imported names its spec: ``module:function(tensors)``, or ``module:one|module:other(tensors)``
of several forms. Any process makes the spec again from that name, so repro lines, stores and campaigns need no more.
"""

from __future__ import annotations

import inspect
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from assay.formats.format import FORMATS
from assay.golden.arithmetic import Arithmetic, BallArithmetic
from assay.golden.errors import DefinitionError, ReferenceRefuses, Undecided, UnknownSpec
from assay.golden.lowering.choices import Answered, Choices
from assay.golden.lowering.conditioning import ConditioningLowering, remarks
from assay.golden.lowering.dispatch import Lowering, run_branches
from assay.golden.lowering.examples import TensorCall, title_of
from assay.golden.lowering.frameworks import in_torch
from assay.golden.lowering.tensor import TracedTensor, read
from assay.golden.options import Option
from assay.golden.registry import Sizes, Spec, define, register
from assay.golden.signature import INTEGERS, SignatureError, check_sizes_of_results, parse
from assay.runtime.errors import AssayError
from assay.runtime.modules import import_users_module
from assay.runtime.source import source_of

_ALL_INTEGERS = (*INTEGERS, *(name for name, row in FORMATS.items() if row.kind == "integer"))
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
STAGES: Mapping[str, str | None] = {
    **{name: name for name in (*NARROW, "float32")},
    "eager_bfloat16": None,
    "eager_float16": None,
    "exponentials": None,
    "normalizer": None,
    "query": None,
    "scores": None,
    "probabilities": "input",
}
"""Roundings that a kernel may make: casts of the reference by their formats, operands of products in the inputs' 16-bit
dtype, the probabilities of attention; and, under the contract "torch", what eager mode rounds between operations."""

Reference = Callable[..., Any]


@dataclass(frozen=True)
class Definition:
    """A reference as an op's definition over any arithmetic: a function of numbers, their dtypes, and options."""

    name: str
    forms: tuple[Reference, ...]
    lowering: Callable[..., Lowering] = Lowering

    def __post_init__(self) -> None:
        module = getattr(self.forms[0], "__module__", None) or "__main__"
        object.__setattr__(self, "__module__", module)  # as a function, which a definition usually is, has it

    def __call__(
        self,
        xp: Arithmetic,
        *numbers: Any,
        dtypes: Sequence[torch.dtype],
        choices: Choices | None = None,
        **options: Any,
    ) -> Any:
        """Return the results; where numbers leave decisions open what ``choices`` takes, by default all answers."""
        with self._own_errors_named(numbers):
            return self._evaluate(xp, numbers, dtypes, options, choices)

    @contextmanager
    def _own_errors_named(self, numbers: Sequence[Any]) -> Iterator[None]:
        """Raise `ReferenceRefuses` for an error of the reference's own inside."""
        try:
            yield
        except (AssayError, MemoryError):
            raise
        except Exception as error:
            shapes = ", ".join(str(tuple(map(int, number.shape))) for number in numbers)
            raise ReferenceRefuses(
                f"{self.name} raised {type(error).__name__} for tensors of shapes {shapes}: "
                f"{' '.join(str(error).split())[:300]}; restrict sizes by shapes=, or tie them ('8*D')"
            ) from error

    def remarks(
        self, xp: BallArithmetic, numbers: Sequence[Any], dtypes: Sequence[torch.dtype], options: Mapping[str, Any]
    ) -> list[str]:
        """Describe where the first form is ill-conditioned on these numbers, and what that costs."""
        ctx = ConditioningLowering(xp, _operand_dtype(dtypes), Answered())
        with self._own_errors_named(numbers):
            results = _run(self.forms[0], ctx, numbers, dtypes, options)
        return remarks(ctx.losses, results, xp.u)

    def _evaluate(
        self,
        xp: Any,
        numbers: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        options: Mapping[str, Any],
        choices: Choices | None,
    ) -> Any:
        operand_dtype = _operand_dtype(dtypes)
        forms: list[tuple[Any, ...]] = []  # of each its results: the hull over all admissible answers to open decisions
        for form in self.forms:
            run = partial(_run, form, numbers=numbers, dtypes=dtypes, options=options)
            if choices is not None:
                forms.append(run(self.lowering(xp, operand_dtype, choices)))
                continue
            runs = run_branches(run, xp, operand_dtype, self.lowering)
            forms.append(runs[0] if len(runs) == 1 else tuple(_hull(xp, parts) for parts in zip(*runs, strict=True)))
        for form, other in zip(self.forms[1:], forms[1:], strict=True):
            self._check_equal(xp, forms[0], other, form)
        if len(forms) == 1:
            return forms[0]
        return tuple(
            results[0]
            if _is_plain(results[0])
            else xp.any_formula(*(lambda result=result: result for result in results))
            for results in zip(*forms, strict=True)
        )

    def _check_equal(self, xp: Arithmetic, first: Sequence[Any], other: Sequence[Any], form: Reference) -> None:
        """Raise `DefinitionError` if a form is certainly another function than the first."""
        if len(first) != len(other):
            raise DefinitionError(
                f"{self.name}: {title_of(form)} gives {len(other)} results, the first form {len(first)}"
            )
        for one, two in zip(first, other, strict=True):
            if tuple(one.shape) != tuple(two.shape):
                shapes = f"{tuple(two.shape)}, the first form {tuple(one.shape)}"
                raise DefinitionError(f"{self.name}: {title_of(form)} gives a result of shape {shapes}")
            if _is_plain(one) or _is_plain(two):
                continue
            order = xp.compare(one, two)
            differs = order.less | order.more
            if bool(differs.any()):
                index = tuple(int(i) for i in differs.nonzero()[0])
                raise DefinitionError(
                    f"{self.name}: {title_of(form)} is another function than the first form: results differ at "
                    f"{list(index)}, {int(differs.sum())} of {differs.numel()} elements"
                )


def _is_plain(result: Any) -> bool:
    return isinstance(result, torch.Tensor) or getattr(result, "dtype", object) not in (object, None)


def _operand_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Return the 16-bit dtype of the inputs, to which kernels round operands of products; None if there is none."""
    return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), None)


def _run(
    form: Reference, ctx: Lowering, numbers: Sequence[Any], dtypes: Sequence[torch.dtype], options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the results of one run, in the arithmetic's numbers."""
    tensors = [
        ctx.wrap(number, dtype, "") if dtype.is_floating_point else torch.as_tensor(number).to(dtype)
        for number, dtype in zip(numbers, dtypes, strict=True)
    ]
    with _without_onednn(), ctx:
        results = form(*tensors, **options)
    return tuple(_result_number(ctx, leaf) for leaf in tree_leaves(results) if leaf is not None)


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Turn oneDNN off: its fused layers have no lowering rules."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _result_number(ctx: Lowering, leaf: Any) -> Any:
    """Return a result's number before its last rounding, which is the kernel's own."""
    if isinstance(leaf, TracedTensor):
        number = read(leaf, unrounded=True)
        return ctx.xp.open_beyond(number) if ctx.overflowed and not leaf.memory.as_operand else number
    if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():
        return ctx.xp.integers(leaf)
    return ctx.xp.exact(leaf if not isinstance(leaf, torch.Tensor) else leaf.detach().double())


def _hull(xp: Any, parts: Sequence[Any]) -> Any:
    if any(tuple(part.shape) != tuple(parts[0].shape) for part in parts):
        raise Undecided("the shapes of the reference's results hang on a choice that rounding leaves open")
    parts = [xp.exact(part) if _is_plain(part) else part for part in parts]
    hull = parts[0]
    for part in parts[1:]:
        hull = xp.hull(hull, part)
    return hull


def reference_spec(
    reference: Reference | Sequence[Reference],
    tensors: str,
    *,
    multiples: Mapping[str, str] | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Spec:
    """Return the spec of a reference: a function, a module, or a list of forms of one function.

    ``tensors`` are its positional arguments and results, in the grammar of `define`
    (``"x[T,D], weight[D] -> y[T,D]"``); sizes must be multiples of ``multiples`` and, where given, among ``sizes`` of
    their symbol. ``options`` are defaults of keywords beyond those of its own signature; reports call it ``name``.
    The same reference and text give the same spec. Raises `DefinitionError`.
    """
    forms = tuple(reference) if isinstance(reference, (list, tuple)) else (reference,)
    for form in forms:
        if not callable(form):
            raise DefinitionError(f"reference: expected a function or a module, got {type(form).__name__}")
    text = " ".join(tensors.split())
    try:
        signature = parse(with_roles(text))
        if signature.returns:
            check_sizes_of_results(text)
    except SignatureError as error:
        raise DefinitionError(f"tensors={error.marked!r}: {error}") from None
    for tensor in signature.tensors:
        if tensor.dtype in _ALL_INTEGERS and not tensor.is_integer:
            raise DefinitionError(
                f"tensors={tensors!r}: {tensor.name} are integers of which nothing is said; expected a role: "
                f"{tensor.name}:{tensor.dtype}[...]=index(V) for those below a size V, =code(10) for those below 10, "
                "=bits for any, of either sign too"
            )
    if not signature.returns:
        raise DefinitionError(f"tensors={tensors!r}: expected what the reference gives too, e.g. 'x[T,D] -> y[T,D]'")
    title = name or title_of(forms[0])
    addresses = [_address(form) for form in forms]
    address = f"{'|'.join(addresses)}({text})" if all(addresses) else f"{title}({text})"
    defaults = options_of(forms[0], len([t for t in signature.tensors if not t.keyword]))
    return register(
        Spec(
            title,
            Definition(title, tuple(map(in_torch, forms))),
            with_roles(text),
            options={**defaults, **{key: _option(value) for key, value in (options or {}).items()}},
            stages=STAGES,
            version=version_of(forms),
            public=False,
            sizes=Sizes({symbol: tuple(allowed) for symbol, allowed in (sizes or {}).items()}, multiples or {}),
            import_name=address,
            needs_dtypes=True,
        )
    )


def define_torch(name: str, signature: str, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a PyTorch function to register it as the op ``name``; the function itself is unchanged.

    It takes the tensors of ``signature`` (``"x[R,N], gate[R,1] -> y[R,N]"``) by position, and its keywords with
    defaults are the op's options. ``fields`` are those of `Spec`, which say more of the op than a reference does:
    independent ``rows``, sizes, inputs, options with usual values, the op that it is ``gradient_of``. Golden and
    tolerance are those of the function as a reference (docs/references.md). Raises `DefinitionError` as `define` does.
    """

    def register_function(function: Callable[..., Any]) -> Callable[..., Any]:
        text = with_roles(" ".join(signature.split()))
        options = options_of(function, len([tensor for tensor in parse(text).tensors if not tensor.keyword]))
        facts = {"stages": STAGES, "version": version_of((function,)), **fields}
        facts["options"] = {**options, **fields.get("options", {})}
        define(name, text, needs_dtypes=True, **facts)(Definition(name, (in_torch(function),)))
        return function

    return register_function


def with_roles(text: str) -> str:
    """Return a signature with full names of dtypes, the role ``code(2)`` of masks, and no roles of integer results.

    Raises `SignatureError`.
    """
    text = str(parse(text))
    inputs, arrow, results = text.partition("->")
    inputs = re.sub(r"(:bool\[[^\]]*\])(?!=)", r"\1=code(2)", inputs)
    return inputs + arrow + re.sub(r"(:(?:bool|int\d+)\[[^\]]*\])=\w+(\([^)]*\))?", r"\1", results)


def named(name: str) -> Spec:
    """Return the spec of a name that `reference_spec` made, in any process; raise `UnknownSpec`, `DefinitionError`."""
    target, _, text = name.partition("(")
    if ":" not in target or not text.endswith(")"):
        raise UnknownSpec(f"reference {name!r}; expected module:function(tensors), as an importable reference has it")
    return reference_spec([_imported(address) for address in target.split("|")], text[:-1])


def _imported(address: str) -> Reference:
    module, _, path = address.partition(":")
    import_users_module(module, f"reference {address!r}", DefinitionError)
    try:
        return attrgetter(path)(import_module(module))
    except AttributeError:
        raise DefinitionError(f"reference {address!r}: {module} has no {path}") from None


def _address(form: Reference) -> str:
    """Return ``module:name`` of a function that can be imported by it; else an empty text."""
    module, path = getattr(form, "__module__", None), getattr(form, "__qualname__", None)
    if not module or not path or module == "__main__" or "<" in path:
        return ""
    try:
        return f"{module}:{path}" if attrgetter(path)(import_module(module)) is form else ""
    except (ImportError, AttributeError):
        return ""


def options_of(form: Reference, tensors: int) -> dict[str, Option]:
    """Return the keywords of a reference beyond its first ``tensors`` parameters, with their defaults."""
    if isinstance(form, TensorCall):
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
    """Return a checksum of the references' source, so that goldens of another text don't count."""
    targets = [form.target if isinstance(form, TensorCall) else form for form in forms]
    return zlib.crc32("".join(source_of(target) for target in targets).encode())
