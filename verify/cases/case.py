"""A case: everything that one call of a kernel depends on, small enough to write on one line.

Also the content of unused elements: numbers on which no result depends can be NaN, and unused indices point to NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from assay.formats.format import FORMATS, Format, format_named
from assay.golden.inputs.recipe import Recipe, tuples
from assay.golden.inputs.values import draw
from assay.golden.signature import INTEGERS, Signature, TensorSpec
from assay.runtime.errors import AssayError
from assay.runtime.records import structured
from assay.verify.cases.layouts import LAYOUTS, Guarded, tied_axes, with_layout
from assay.verify.errors import ReproError, SettingError

Tensor = torch.Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def with_unused_nan(
    values: Mapping[str, Tensor], masks: Mapping[str, Tensor], tensors: Sequence[TensorSpec]
) -> dict[str, Tensor]:
    """Return ``values`` with NaN for every number under its mask.

    An index under its mask points to an unused row, if there is one, and otherwise stays unchanged: it must not lead a
    faulty kernel out of the tensor, where a read crashes the process instead of revealing the fault.
    """
    result = dict(values)
    for tensor in tensors:
        name = tensor.name
        if name not in masks:
            continue
        if not tensor.is_integer:
            result[name] = _with_nan(values[name], masks[name])
        elif tensor.role == "index":
            indices = _unused_positions(tensor.bound, tensors, masks)
            if len(indices):
                stale = indices[values[name].to(torch.int64) % len(indices)].to(values[name].dtype)
                result[name] = torch.where(masks[name], stale, values[name])
    return result


def _unused_positions(symbol: str, tensors: Sequence[TensorSpec], masks: Mapping[str, Tensor]) -> Tensor:
    """Return the indices along ``symbol`` at which no tensor has a used element."""
    unused = [
        masks[tensor.name].movedim(tensor.dims.index(symbol), 0).flatten(1).all(1)
        for tensor in tensors
        if symbol in tensor.dims and tensor.name in masks
    ]
    return torch.stack(unused).all(0).nonzero()[:, 0] if unused else torch.zeros(0, dtype=torch.int64)


def _with_nan(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` with NaN under ``mask``, by their bits: torch supports few operations on 8-bit floats."""
    bits = _BITS[values.dtype.itemsize]
    nan = torch.full(values.shape, math.nan, dtype=torch.float32).to(values.dtype)
    return torch.where(mask, nan.view(bits), values.view(bits)).view(values.dtype)


Edit = tuple[str, tuple[int, ...], float]


@dataclass(frozen=True)
class EarlierCall:
    """A call before the judged one (`assay.verify.cases.sequences`).

    ``data`` 0 is the case's own, another number another draw. ``memory`` is that of the case's tensors ("same"), or
    "other". ``sizes``, ``options`` and ``dtype`` are those that differ from the case's; such calls have other memory.
    """

    data: int = 0
    memory: str = "same"
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        content = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in content.items() if value and value != "same"}


@dataclass(frozen=True)
class Case(Recipe):
    """One call of a kernel: the recipe of its inputs, their memory layouts, and the calls to make.

    ``values`` are the names of the tensors' distributions; elsewhere in this package values are tensors.
    ``layouts`` are those of the tensors, by name. ``edits`` set single elements, ``(tensor, coordinates, value)``.
    ``memory`` is the content of fresh memory: "plain" (whatever was there), "nan" or "huge" (2^100). ``protocol`` says
    which calls are made, see `assay.verify.harness.runner`; ``before`` are the calls before the judged one, where they
    are other ones than the protocol always makes. ``unused`` is the content of elements on which no result
    depends: "plain" (numbers as elsewhere) or "nan". ``origin`` are the first coordinates along a symbol: elements keep
    their values when a shape is cut at the front. ``out_dtype`` is that of the first result, if stated. ``configs`` are
    the configurations in which autotuned launches run on a device, by kernel (`assay.interpreter.Assignment`); cases
    that differ in nothing else are equal.
    """

    layouts: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    memory: str = "plain"
    protocol: str = "once"
    before: tuple[EarlierCall, ...] = ()
    unused: str = "plain"
    origin: Mapping[str, int] = field(default_factory=dict)
    out_dtype: str | None = None
    configs: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def signature(self) -> Signature:  # read many times a call
        """The signature under this case's options."""
        return self.definition.signature(self.options)

    @cached_property
    def result_dtypes(self) -> tuple[str, ...]:
        """The dtype of each result: stated, fixed by the op, or that of the first floating input of at least 16 bits.

        Raises `SettingError` if none of these determines it.
        """
        wide = [name for name in self.dtypes.values() if _is_wide_float(name)]
        results = []
        for order, tensor in enumerate(self.signature.returns):
            stated = self.out_dtype if order == 0 or tensor.dtype is None else None
            if tensor.role == "rounded" and stated not in (None, tensor.dtype):
                raise SettingError(f"out_dtype={stated!r}; the codes of {self.spec} are {tensor.dtype}")
            dtype = stated or tensor.dtype or next(iter(wide), None)
            if dtype is None:
                raise SettingError(f"out_dtype: no input has 16 bits or more; state the dtype of {tensor.name}")
            results.append(dtype)
        return tuple(results)

    @cached_property
    def result_formats(self) -> tuple[Format, ...]:
        """The format that each result is rounded to; float64 for integers and masks."""
        pairs = zip(self.signature.returns, self.result_dtypes, strict=True)
        return tuple(format_named("float64" if t.is_integer or dtype in INTEGERS else dtype) for t, dtype in pairs)

    @property
    def input_format(self) -> Format:
        """The format of the first tensor, which contracts call "input"; words that pack several codes don't count.

        It is float32 where all tensors are indices, counts or masks.
        """
        return format_named(next((dtype for dtype in self.dtypes.values() if dtype in FORMATS), "float32"))

    def shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the shape of one of the signature's tensors."""
        return tensor.shape(self.sizes)

    def _drawn(self, keyword: bool) -> dict[str, torch.Tensor]:
        values = all_contents(self)
        return {tensor.name: values[tensor.name] for tensor in self.signature.tensors if tensor.keyword == keyword}

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for `from_dict`; JSON has no NaN, so edits are text."""
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: value for name, value in content.items() if value and value != _DEFAULTS.get(name)}
        if self.before:
            changed["before"] = [call.as_dict() for call in self.before]
        if self.edits:
            changed["edits"] = [[tensor, list(index), str(value)] for tensor, index, value in self.edits]
        return {"spec": self.spec, "sizes": self.sizes, "dtypes": self.dtypes, **changed}

    @staticmethod
    def from_dict(content: Any) -> Case:
        """Return the case of an `as_dict`, or of its JSON. Raises `ReproError` if it isn't one."""
        try:
            if isinstance(content, Mapping) and "edits" in content:
                edits = [(tensor, index, float(value)) for tensor, index, value in content["edits"]]
                content = {**content, "edits": edits}
            case = structured(content, Case, "case", ReproError)
            case = replace(case, options={name: tuples(value) for name, value in case.options.items()})
            before = (
                replace(call, options={name: tuples(value) for name, value in call.options.items()})
                for call in case.before
            )
            case = replace(case, before=tuple(before))
            case.definition.complete(case.options)
            missing = set(case.signature.symbols) - set(case.sizes)
        except (AssayError, TypeError, ValueError) as error:
            raise ReproError(f"repro line: {error}") from None
        if missing:
            raise ReproError(f"repro line: no size for {', '.join(sorted(missing))}")
        return case

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        usual = self.definition.complete({})
        options = "".join(f", {name}={value}" for name, value in self.options.items() if value != usual[name])
        tensors = ", ".join(
            f"{name} {self.dtypes[name]} {self.values.get(name, '')}"
            + ("" if self.layouts.get(name, "contiguous") == "contiguous" else f" ({self.layouts[name]})")
            for name in self.dtypes
        )
        cut = "".join(
            f"; the first {f'{first} places' if first > 1 else 'place'} along {name} cut off"
            for name, first in self.origin.items()
            if first
        )
        edits = cut + "".join(f"; {words}" for words in edits_in_words(self.edits))
        unused = "" if self.unused == "plain" else f"; {self.unused} wherever nothing is read"
        configs = "".join(f"; {words}" for words in configs_in_words(self.configs))
        return f"{self.spec}: {sizes}{options}; {tensors}{edits}{unused}; seed {self.seed}{configs}"


def configs_in_words(configs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the configurations of each autotuned kernel."""
    return [f"{kernel} with {', then '.join(dict.fromkeys(each))}" for kernel, each in configs.items()]


def edits_in_words(edits: Sequence[Edit], most: int = 4) -> list[str]:
    """Return the edited elements in words, equal neighbours along the last axis joined; at most ``most`` of them."""
    results: list[tuple[str, tuple[int, ...], int, float]] = []  # tensor, first index, how many, value
    for name, index, value in sorted(edits, key=lambda edit: edit[:2]):
        if results and index:
            last, first, count, before = results[-1]
            follows = (last, first[:-1], first[-1] + count) == (name, index[:-1], index[-1])
            if follows and repr(before) == repr(value):
                results[-1] = (last, first, count + 1, before)
                continue
        results.append((name, index, 1, value))
    words = [f"{name}[{_index_text(index, count)}] = {value:g}" for name, index, count, value in results[:most]]
    return [*words, f"{len(results) - most} more elements"] if len(results) > most else words


def _index_text(index: tuple[int, ...], count: int) -> str:
    if not index:
        return ""
    end = f"{index[-1]}:{index[-1] + count}" if count > 1 else f"{index[-1]}"
    return ", ".join([*map(str, index[:-1]), end])


_DEFAULTS = {f.name: f.default for f in fields(Case)}


def _is_wide_float(dtype: str) -> bool:
    if dtype in INTEGERS:
        return False
    format = format_named(dtype)
    return format.kind == "float" and format.bits >= 16


def layout_of(case: Case, tensor: TensorSpec) -> str:
    """Return the layout of a tensor; matrices of a domain are never made of one row."""
    layout, shape = case.layouts.get(tensor.name, LAYOUTS[0]), case.shape(tensor)
    if tensor.role == "spd" and any(axis >= len(shape) - 2 for axis in tied_axes(layout, shape)):
        return LAYOUTS[0]
    return layout


def contents(case: Case, tensor: TensorSpec) -> torch.Tensor:
    """Return the values of a tensor, contiguous, in its dtype."""
    shape = case.shape(tensor)
    tied = tied_axes(layout_of(case, tensor), shape)
    start = [case.origin.get(symbol, 0) for symbol in tensor.dims]
    distribution = case.values.get(tensor.name, "")
    result = draw(tensor, case.sizes, case.dtypes[tensor.name], distribution, case.seed, start=start, tied=tied)
    for name, index, value in case.edits:
        if name == tensor.name and all(0 <= position < size for position, size in zip(index, shape, strict=True)):
            result[tuple(slice(None) if axis in tied else i for axis, i in enumerate(index))] = value
    return result


def all_contents(case: Case) -> dict[str, torch.Tensor]:
    """Return the values of all tensors, by name, with unused elements as ``case.unused`` says."""
    tensors = case.signature.tensors
    values = {tensor.name: contents(case, tensor) for tensor in tensors}
    if case.unused == "plain" or case.definition.inputs.unused is None:
        return values
    masks = dict(case.definition.inputs.unused(*values.values()))
    for name, mask in masks.items():
        for axis in tied_axes(case.layouts.get(name, "contiguous"), mask.shape):  # one element for all of them
            masks[name] = mask.all(axis, keepdim=True).expand(mask.shape)
    return with_unused_nan(values, masks, tensors)


@dataclass(frozen=True)
class Inputs:
    """A case's tensors in memory, by name, in the order of the signature."""

    guarded: Mapping[str, Guarded]
    keywords: tuple[str, ...]

    @property
    def positional(self) -> list[torch.Tensor]:
        """The tensors that the kernel takes by position."""
        return [guarded.tensor for name, guarded in self.guarded.items() if name not in self.keywords]

    def damage(self) -> tuple[str, str] | None:
        """Return the first input whose memory has changed, and the kind of change; None if there is none."""
        seen = ((name, guarded.damage()) for name, guarded in self.guarded.items())
        return next(((name, kind) for name, kind in seen if kind is not None), None)


def build(case: Case, device: torch.device | str = "cpu") -> Inputs:
    """Return the case's tensors, each placed in memory by its layout."""
    values = all_contents(case)
    tensors = case.signature.tensors
    guarded = {t.name: with_layout(values[t.name], layout_of(case, t), device) for t in tensors}
    return Inputs(guarded, tuple(tensor.name for tensor in tensors if tensor.keyword))
