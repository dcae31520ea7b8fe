"""`Call`: an op with checked tensors and options, evaluated whole, in blocks of rows, or at chosen indices; `bind`
makes it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from assay.golden.arithmetic import Arithmetic, Exact
from assay.golden.errors import DefinitionError, InputError, OptionError
from assay.golden.evaluation.cutting import selected
from assay.golden.evaluation.device import device_for, on_cpu, placed, release
from assay.golden.evaluation.golden import Golden, golden_of
from assay.golden.registry import Spec
from assay.golden.signature import Signature, TensorSpec, symbols_in

Tensor = torch.Tensor

_LOG = logging.getLogger(__name__)
_MOST_WHOLE = 2**53  # whole numbers up to it are float64 numbers
Index = Mapping[str, Tensor | slice]
_BLOCK = 2**17  # numbers in a block of rows, so that its intermediates fit in a processor's cache
_EXACT_BLOCK = 2**15  # the same in double-double arithmetic, with more words and intermediates
_AXES_ARE_KEPT = (
    "xp.sum, xp.mean and xp.max keep their axis, with size one: drop it by [..., 0], and [:, None] isn't needed"
)


@dataclass(frozen=True)
class Call:
    """An op, its tensors by name in the order of the signature, and its complete options; `bind` makes and checks it.

    ``sizes`` are those of the signature's symbols; a `part` keeps those of the whole call.
    """

    spec: Spec
    signature: Signature
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any]
    sizes: Mapping[str, int]

    @cached_property
    def rows(self) -> str | None:
        """The symbol along which results can be evaluated separately."""
        return self._divisible(self.spec.row_axis(self.options))

    @cached_property
    def columns(self) -> str | None:
        """A second such symbol; that of the last axis if the op is elementwise."""
        alone = self.signature.returns[0].dims[-1] if self.spec.axes.elementwise else None
        return self._divisible(self.spec.axes.columns or alone)

    def _divisible(self, symbol: str | None) -> str | None:
        """Return the symbol, or None if some dimension is an expression in it, whose size a part of the rows would
        change."""
        tensors = (*self.signature.tensors, *self.signature.returns)
        in_results = symbol is not None and any(symbol in tensor.dims for tensor in self.signature.returns)
        in_expression = any(symbol != text and symbol in symbols_in(text) for tensor in tensors for text in tensor.dims)
        return symbol if in_results and not in_expression else None

    @cached_property
    def is_finite(self) -> bool:
        """Whether all numbers of all tensors are finite."""
        values = (value for value in self.tensors.values() if value.is_floating_point())
        return all(bool(torch.isfinite(value.double()).all()) for value in values)

    def size(self, symbol: str) -> int:
        """Return the size of a symbol that is a dimension of some tensor."""
        holder = next(tensor for tensor in self.signature.tensors if symbol in tensor.dims)
        return self.tensors[holder.name].shape[holder.dims.index(symbol)]

    @property
    def numbers(self) -> int:
        """How many numbers the tensors have, and the results whose dimensions these determine."""
        symbols = self.sizes.keys()
        known = [each for each in self.signature.returns if all({*symbols_in(text)} <= symbols for text in each.dims)]
        results = sum(math.prod(tensor.shape(self.sizes)) for tensor in known)
        return results + sum(value.numel() for value in self.tensors.values())

    def on(self, device: torch.device) -> Call:
        """Return the call with its tensors on a device."""
        return replace(self, tensors={name: value.to(device) for name, value in self.tensors.items()})

    def part(self, index: Index) -> Call:
        """Return the call restricted to these indices along each symbol."""
        parts = {each.name: selected(each, self.tensors[each.name], index) for each in self.signature.tensors}
        return replace(self, tensors=parts)

    def results(
        self, xp: Arithmetic, chosen: Mapping[str, Tensor] | None = None, choices: Any = None
    ) -> tuple[Any, ...]:
        """Return the results as numbers of the arithmetic ``xp``.

        ``chosen``: a kernel's own choices by result name, for an op whose other results depend on them. ``choices``:
        what a reference takes where its numbers leave decisions open (`assay.golden.lowering.choices`); other
        definitions don't read it.
        """
        numbers = {
            tensor.name: xp.integers(value) if tensor.is_integer else xp.exact(value.to(torch.float64))
            for tensor, value in zip(self.signature.tensors, self.tensors.values(), strict=True)
        }
        handed = {tensor.name: numbers.pop(tensor.name) for tensor in self.signature.tensors if tensor.keyword}
        plain = {name: value for name, value in self.options.items() if name not in handed}
        plain |= {name: None for name in plain if self.spec.options[name].tensor}
        for name, value in (chosen or {}).items():
            handed[name] = xp.exact(value.to(torch.float64)) if value.is_floating_point() else xp.integers(value)
        if self.spec.needs_dtypes:
            plain["dtypes"] = [value.dtype for value in self.tensors.values()]
            plain |= {} if choices is None else {"choices": choices}
        try:
            with xp.precision():
                results = self.spec.definition(xp, *numbers.values(), **handed, **plain)
        except IndexError as error:
            raise DefinitionError(f"{self.spec.name}: IndexError: {error}; {_AXES_ARE_KEPT}") from error
        results, expected = results if isinstance(results, tuple) else (results,), self.signature.returns
        if len(results) != len(expected):
            names = ", ".join(map(str, expected))
            raise DefinitionError(
                f"{self.spec.name}: its definition gives {len(results)} results; expected {len(expected)} ({names})"
            )
        for tensor, result in zip(expected, results, strict=True):
            shape = list(map(int, result.shape))
            if self.spec.needs_dtypes and tuple(shape) != (stated := tensor.shape(self.sizes)):
                sizes = ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())
                words = f"is stated as {tensor}, {list(stated)} at {sizes}, and the reference gives {shape}"
                raise DefinitionError(f"tensors=: {self.spec.name}: {words}; state what it gives")
            if len(shape) != len(tensor.dims):
                raise DefinitionError(f"{self.spec.name}: {tensor} came with the shape {shape}; {_AXES_ARE_KEPT}")
        return results

    def under(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """Return the results in an arithmetic as goldens."""
        return tuple(map(golden_of, self.results(arithmetic)))

    def in_blocks(self, arithmetic: Arithmetic) -> tuple[Golden, ...]:
        """Return the same as `under`, a block of rows at a time if the rows share little."""
        block, rows = _EXACT_BLOCK if isinstance(arithmetic, Exact) else _BLOCK, self.rows
        total = sum(value.numel() for value in self.tensors.values())
        if total <= block or rows is None:
            return self.under(arithmetic)
        own = sum(self.tensors[tensor.name].numel() for tensor in self.signature.tensors if rows in tensor.dims)
        shared = total - own
        count = self.size(rows)
        step = max(1, block * count // max(own, 1))
        if step >= count or shared * 8 > min(own, block):
            return self.under(arithmetic)
        joined: tuple[Golden, ...] = ()
        for first in range(0, count, step):
            last = min(first + step, count)
            block_goldens = self.part({rows: slice(first, last)}).under(arithmetic)
            if not joined:
                joined = tuple(
                    _widened(golden, tensor, rows, count)
                    for golden, tensor in zip(block_goldens, self.signature.returns, strict=True)
                )
            for golden, new, tensor in zip(joined, block_goldens, self.signature.returns, strict=True):
                if rows in tensor.dims:
                    axis = tensor.dims.index(rows)
                    for target, source in zip(_words(golden), _words(new), strict=True):
                        target.narrow(axis, first, last - first).copy_(source)
        return joined

    def indices_of(self, wanted: list[Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the indices to evaluate: rows and columns of the wanted elements, or row by row if they are sparse."""
        rows, columns = self.rows, self.columns
        if rows is None:
            yield {}
            return
        need = torch.zeros(self.size(rows), self.size(columns) if columns else 1, dtype=torch.bool)
        for mask, tensor in zip(wanted, self.signature.returns, strict=True):
            if rows not in tensor.dims:
                need |= bool(mask.any())
                continue
            first = [tensor.dims.index(symbol) for symbol in (rows, columns) if symbol in tensor.dims]
            flat = mask.permute(*first, *(axis for axis in range(mask.ndim) if axis not in first))
            flat = flat.reshape(*flat.shape[: len(first)], -1).any(-1)
            need |= flat if flat.ndim == 2 else flat[:, None] & (torch.arange(need.shape[1]) == 0)
        which, across = need.any(1).nonzero()[:, 0], need.any(0).nonzero()[:, 0]
        if columns is None:
            yield {rows: which}
        elif int(need.sum()) * 4 >= len(which) * len(across):
            yield {rows: which, columns: across}
        else:
            for row in which:
                yield {rows: row[None], columns: need[row].nonzero()[:, 0]}


def grid(tensor: TensorSpec, value: Tensor, index: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return index arrays that select a result's elements at ``index`` along its symbols, and all along the others."""
    axes = [index.get(text, torch.arange(size)) for text, size in zip(tensor.dims, value.shape, strict=True)]
    return torch.meshgrid(*axes, indexing="ij") if axes else ()


def _words(golden: Golden) -> list[Tensor]:
    return [word for word in (golden.value, golden.radius, golden.low) if word is not None]


def _widened(golden: Golden, tensor: TensorSpec, rows: str, count: int) -> Golden:
    if rows not in tensor.dims:
        return golden
    axis = tensor.dims.index(rows)
    return Golden(*(word.new_empty((*word.shape[:axis], count, *word.shape[axis + 1 :])) for word in _words(golden)))


def run(
    definition: Spec,
    xp: Arithmetic,
    tensors: Sequence[Any],
    options: Mapping[str, Any],
    chosen: Mapping[str, torch.Tensor] | None = None,
    choices: Any = None,
) -> tuple[Any, ...]:
    """Return the results of a definition as numbers of the arithmetic ``xp``: `bind` and `Call.results` in one.

    Balls of a large call are evaluated on the device of `evaluating_on`. Should that fail, by too little memory, an
    operation that it lacks, or a choice that rounding leaves open, the CPU evaluates them, whose errors are those of
    the definition.
    """
    call = bind(definition, tensors, options)
    if (device := device_for(xp, call.numbers)) is not None:
        try:
            return _evaluated_on(device, call, xp, chosen or {}, choices)
        except Exception as error:
            _LOG.info("%s is evaluated on the CPU, since %s failed: %s", definition.name, device, error)
            if choices is not None:
                choices.restart()
        finally:
            release(device)
    return call.results(xp, chosen, choices)


def bind(definition: Spec, tensors: Sequence[Any], options: Mapping[str, Any]) -> Call:
    """Return the call of an op with ``tensors`` by position, and ``options`` including keyword tensors.

    Tensors are torch tensors or anything that numpy converts to an array. A tensor passed for a flag (``sinks=tensor``)
    also sets the flag.

    Raises `OptionError`, `ShapeError` or `InputError`.
    """
    keywords = {name: value for name, value in options.items() if hasattr(value, "shape")}
    plain = {name: value for name, value in options.items() if name not in keywords}
    complete = definition.complete(plain | {name: True for name in keywords if name in definition.options})
    signature = definition.signature(complete)
    named = [tensor.name for tensor in signature.tensors if tensor.keyword]
    for tensor in signature.tensors:
        if tensor.keyword and tensor.name not in keywords:
            raise OptionError(f"{definition.name}: expected the keyword tensor {tensor}, got none")
    for name in sorted(set(keywords) - set(named)):
        raise OptionError(f"{definition.name}: {name}= is a tensor that the given options do not call for")
    values = [*tensors, *(keywords[name] for name in named)]
    if len(values) != len(signature.tensors):
        signature.bind(definition.name, [()] * len(values))  # says what it expects
    stored = {
        tensor.name: _tensor(definition, tensor, value) for tensor, value in zip(signature.tensors, values, strict=True)
    }
    sizes = signature.bind(definition.name, [tuple(value.shape) for value in stored.values()])
    unused = definition.inputs.unused(*stored.values()) if definition.inputs.unused else {}
    for tensor in signature.tensors:
        if tensor.is_integer and tensor.bound:
            _check_integers(definition, tensor, stored[tensor.name], unused.get(tensor.name), tensor.most(sizes))
    return Call(definition, signature, stored, complete, sizes)


def _tensor(definition: Spec, tensor: TensorSpec, value: Any) -> torch.Tensor:
    """Return ``value`` as a CPU tensor of the kind that the signature declares; lists keep float64's digits."""
    try:
        converted = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError of a meta tensor among them
        why = str(error).partition("\n")[0]
        raise InputError(f"{definition.name}: {tensor.name} is no tensor of numbers: {why}") from None
    if converted.layout != torch.strided:
        raise InputError(f"{definition.name}: {tensor.name} is sparse; give it as .to_dense()")
    is_mask = converted.dtype == torch.bool and tensor.dtype == "bool"
    fractional = converted.dtype.is_floating_point or converted.dtype.is_complex
    whole = is_mask or not (fractional or converted.dtype == torch.bool)
    if tensor.is_integer and not whole:
        raise InputError(f"{definition.name}: {tensor.name} must be integers, got {converted.dtype}")
    if converted.dtype.is_complex or (converted.dtype == torch.bool and not is_mask):
        raise InputError(f"{definition.name}: {tensor.name} must be real numbers, got {converted.dtype}")
    if converted.dtype == torch.uint8 and (tensor.dtype or "").startswith(("fp8", "float8")):
        view = "float8_e4m3fn" if tensor.dtype == "fp8" else tensor.dtype
        raise InputError(
            f"{definition.name}: {tensor.name} must be numbers, got bytes; give codes as .view(torch.{view})"
        )
    if whole and not tensor.is_integer and converted.element_size() == 8:
        numbers = converted.numpy()
        if bool(((numbers > _MOST_WHOLE) | (numbers < -_MOST_WHOLE)).any()):
            raise InputError(
                f"{definition.name}: {tensor.name} holds whole numbers beyond 2^53, which float64 would round; "
                "give it as floating-point numbers"
            )
    return converted


def _check_integers(
    definition: Spec, tensor: TensorSpec, value: torch.Tensor, unused: torch.Tensor | None, highest: int
) -> None:
    """Raise `InputError` unless the integers that some result depends on are in 0..highest, and offsets ascend."""
    used = value if unused is None else value[~unused]
    used = used if tensor.none is None else used[used != tensor.none]
    if not used.numel():
        return
    least, most = int(used.min()), int(used.max())
    if least < 0 or most > highest:
        raise InputError(f"{definition.name}: {tensor.name} must lie in 0..{highest}, got {least}..{most}")
    if tensor.role != "offsets":
        return
    offsets, got = value.tolist(), ""
    falls = [i for i in range(1, len(offsets)) if offsets[i] < offsets[i - 1]]
    if falls:
        got = f"{offsets[falls[0]]} after {offsets[falls[0] - 1]} at place {falls[0]}"
    elif offsets[0] != 0 or offsets[-1] != highest:
        got = f"{offsets[0]}..{offsets[-1]}"
    if got:
        raise InputError(f"{definition.name}: {tensor.name} must rise from 0 to {highest}, got {got}")


def _evaluated_on(
    device: torch.device, call: Call, xp: Arithmetic, chosen: Mapping[str, torch.Tensor], choices: Any
) -> tuple[Any, ...]:
    """Return the results of a call that a device evaluates, on the CPU."""
    with placed(xp, device) as balls:
        moved = {name: value.to(device) for name, value in chosen.items()}
        results = call.on(device).results(balls, moved, choices)
    return tuple(map(on_cpu, results))
