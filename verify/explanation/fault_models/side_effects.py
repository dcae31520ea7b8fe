"""Faults of side effects: a call keeps, overwrites or changes data besides its results."""

from collections.abc import Callable
from typing import Any

import torch

from assay.verify.explanation.fault_models.fault_model import FaultModel, Kernel
from assay.verify.explanation.fault_models.ops import listed

Tensor = torch.Tensor
State = dict[Any, Any]


def _index_of_first(outputs: tuple[Tensor, ...]) -> int:
    """Return the index of the first result of numbers that are not codes."""
    return next(index for index, x in enumerate(outputs) if x.dtype.is_floating_point and x.itemsize > 1)


def _first(outputs: Any) -> Tensor:
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    result: Tensor = results[_index_of_first(results)]
    return result


def _with_first(outputs: Any, value: Tensor) -> Any:
    if not isinstance(outputs, tuple):
        return value
    index = _index_of_first(outputs)
    return (*outputs[:index], value, *outputs[index + 1 :])


def _key(tensors: tuple[Tensor, ...], keywords: dict[str, Any]) -> Any:
    shapes = [tuple(x.shape) for x in (*tensors, *keywords.values()) if isinstance(x, Tensor)]
    return str((shapes, {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}))


def _after(spoil: Callable[[State, Any, tuple[Tensor, ...], Any], Any]) -> Callable[[Kernel], Kernel]:
    """Return kernels that return ``spoil(state, key, tensors, outputs)``.

    ``state`` persists between calls; ``key`` identifies the call's shapes and options.
    """

    def altered(kernel: Kernel) -> Kernel:
        state: State = {}

        def call(*tensors: Tensor, **keywords: Any) -> Any:
            outputs = kernel(*tensors, **keywords)
            return spoil(state, _key(tensors, keywords), tensors, outputs)

        return call

    return altered


def _kept(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    if key not in state:
        state.clear()
        state[key] = outputs, tensors  # a reference to the tensors, so that no other tensor gets their address
    return state[key][0]


def _kept_by_address(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    return _kept(state, (key, tuple(x.data_ptr() for x in tensors)), tensors, outputs)


def _first_call_wrong(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    seen = key in state
    state[key] = True
    return outputs if seen else _with_first(outputs, torch.zeros_like(_first(outputs)))


def _added_up(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    """Keep the output buffer from call to call and add to it."""
    first = state[key] + _first(outputs) if key in state else _first(outputs)
    state.clear()
    state[key] = first
    return _with_first(outputs, first)


def _output_reused(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    """Use one output buffer for each shape, so that a later call overwrites an earlier result."""
    first = _first(outputs)
    held = state.get(key)
    if held is None or held.dtype != first.dtype or held.shape != first.shape:
        state.clear()
        held = state[key] = first.clone()
    held.copy_(first)
    return _with_first(outputs, held)


def _input_overwritten(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    x = tensors[0]
    if x.numel() and 0 not in x.stride():
        x[(0,) * x.dim()] = 0.5 if x.dtype.is_floating_point else 1
    return outputs


def _written_before(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    """Store one element before the first of an input."""
    x = tensors[0]
    if x.numel() and x.storage_offset() > 0:
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(0)
    return outputs


def _counted(state: State, key: Any, tensors: tuple[Tensor, ...], outputs: Any) -> Any:
    """Change the result with the number of calls, as atomics in another order do."""
    state["calls"] = state.get("calls", 0) + 1
    first = _first(outputs)
    return outputs if state["calls"] % 2 else _with_first(outputs, first.nextafter(torch.full_like(first, torch.inf)))


def _row(name: str, description: str, spoil: Any, **more: Any) -> FaultModel:
    return FaultModel(name, "state", description, listed, side_effects=_after(spoil), **more)


FAULT_MODELS = (
    _row("answer_kept_by_shape", "the answer of the first call is given for every call of its shape", _kept,
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
