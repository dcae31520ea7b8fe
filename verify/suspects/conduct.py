"""Faults of what a call does beside its mathematics: what it keeps, overwrites, or does another time."""

from __future__ import annotations

from typing import Any

import torch

from assay.golden.registry import specs
from assay.verify.suspects.suspect import Kernel, Suspect

Tensor = torch.Tensor


def _place(outputs: tuple[Tensor, ...]) -> int:
    """Which result to spoil: the first of numbers that are no codes."""
    return next(place for place, x in enumerate(outputs) if x.dtype.is_floating_point and x.itemsize > 1)


def _first(outputs: Any) -> Tensor:
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    found: Tensor = results[_place(results)]
    return found


def _with_first(outputs: Any, value: Tensor) -> Any:
    if not isinstance(outputs, tuple):
        return value
    place = _place(outputs)
    return (*outputs[:place], value, *outputs[place + 1 :])


def _key(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> Any:
    shapes = [tuple(x.shape) for x in (*tensors, *keywords.values()) if isinstance(x, Tensor)]
    return str((shapes, {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}))


def _kept_by_shape(kernel: Kernel) -> Kernel:
    kept: dict[Any, Any] = {}

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        key = _key(tensors, keywords)
        if key not in kept:
            kept.clear()
            kept[key] = kernel(*tensors, **keywords)
        return kept[key]

    return call


def _kept_by_address(kernel: Kernel) -> Kernel:
    kept: dict[Any, Any] = {}

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        key = (_key(tensors, keywords), tuple(x.data_ptr() for x in tensors))
        if key not in kept:
            kept.clear()
            kept[key] = (kernel(*tensors, **keywords), tensors)  # holds the memory, so that its address means it
        return kept[key][0]

    return call


def _first_call_wrong(kernel: Kernel) -> Kernel:
    seen: set[Any] = set()

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        outputs, key = kernel(*tensors, **keywords), _key(tensors, keywords)
        if key in seen:
            return outputs
        seen.add(key)
        return _with_first(outputs, torch.zeros_like(_first(outputs)))

    return call


def _added_up(kernel: Kernel) -> Kernel:
    """The output buffer is kept from call to call, and added to."""
    buffers: dict[Any, Tensor] = {}

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        outputs, key = kernel(*tensors, **keywords), _key(tensors, keywords)
        first = _first(outputs)
        if key in buffers:
            first = buffers[key] + first
        buffers.clear()
        buffers[key] = first
        return _with_first(outputs, first)

    return call


def _output_reused(kernel: Kernel) -> Kernel:
    """One output buffer a shape: a later call overwrites an earlier one's result."""
    buffers: dict[Any, Tensor] = {}

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        outputs, key = kernel(*tensors, **keywords), _key(tensors, keywords)
        first = _first(outputs)
        held = buffers.get(key)
        if held is None or held.dtype != first.dtype or held.shape != first.shape:
            buffers.clear()
            held = buffers[key] = first.clone()
        held.copy_(first)
        return _with_first(outputs, held)

    return call


def _input_overwritten(kernel: Kernel) -> Kernel:
    def call(*tensors: Tensor, **keywords: Any) -> Any:
        outputs = kernel(*tensors, **keywords)
        if tensors[0].numel() and 0 not in tensors[0].stride():
            index = (0,) * tensors[0].dim()
            tensors[0][index] = 1 if not tensors[0].dtype.is_floating_point else 0.5
        return outputs

    return call


def _written_before(kernel: Kernel) -> Kernel:
    """A store one element before the first of an input."""

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        outputs, x = kernel(*tensors, **keywords), tensors[0]
        if x.numel() and x.storage_offset() > 0:
            x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
        return outputs

    return call


def _counted(kernel: Kernel) -> Kernel:
    """A result that depends on how many calls came before: atomics in another order."""
    calls = 0

    def call(*tensors: Tensor, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        outputs = kernel(*tensors, **keywords)
        first = _first(outputs)
        return outputs if calls % 2 else _with_first(outputs, torch.nextafter(first, torch.full_like(first, torch.inf)))

    return call


def _row(name: str, description: str, conduct: Any, **more: Any) -> Suspect:
    return Suspect(name, "state", description, specs(), conduct=conduct, **more)


SUSPECTS = (
    _row("answer_kept_by_shape", "the answer of the first call is given for every call of its shape", _kept_by_shape,
         needs="two calls of one shape with other data"),
    _row("answer_kept_by_address", "the answer is kept for as long as the inputs lie in the same memory",
         _kept_by_address, needs="other data in the same memory"),
    _row("first_call_wrong", "the first call of a shape gives zeros: its tuning runs left them", _first_call_wrong,
         origin="triton#4217, #7181", needs="the first call judged, not only later ones"),
    _row("output_added_up", "the output is not zeroed between calls, and added to", _added_up,
         origin="rocm-libraries#9055, cutlass#2674", needs="two calls of one shape"),
    _row("output_buffer_reused", "a later call overwrites an earlier call's result", _output_reused,
         needs="a result looked at after another call"),
    _row("input_overwritten", "an input is overwritten", _input_overwritten, origin="Liger#1251",
         needs="inputs compared after the call"),
    _row("written_before_input", "memory in front of an input is written", _written_before, origin="aiter#5290",
         needs="guard zones around the inputs"),
    _row("results_vary_by_call", "the same call gives other bits the second time", _counted, origin="vllm#53257",
         needs="the same call twice"),
)  # fmt: skip
