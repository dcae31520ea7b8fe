"""Cheap calls: the host's work for a call is recorded once for each signature of its arguments, and then replayed.

An ordinary call checks its arguments, passes torch's dispatcher, allocates, computes grids and descriptors, and has
Triton look up the configuration and the compiled kernel: over 40 us, where a small kernel takes 5. All of it depends
on the arguments' signature alone: dtypes, shapes, strides, devices and alignments of tensors, and the other values. The
second call of a signature is therefore recorded as a `Plan`: operators on tensors, and launches of compiled kernels
with their grids. Later calls replay it. The first call isn't recorded, because autotuners time their configurations in
it.

An operator whose result or shape depends on the contents of a tensor (`.item()`) ends the recording: calls of such a
signature stay ordinary. So do all calls that something else has to see: autograd, torch.compile, vmap, a dispatch or
function mode, a profiler, a hook on launches, an interpreter or a recorder in place of Triton's launch.

Why no CUDA graph: a graph fixes the addresses of its tensors, and these are calls with new tensors. A plan takes the
addresses of each call's arguments, and allocates each call's results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton import knobs
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 15  # low bits of an address in a signature: Triton and TMA ask for 16 bytes, and nothing asks for more
_MOST_PLANS = 1024  # of a function; beyond, all are dropped: sizes that never come again would fill memory
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}

_CALLED_ONCE, _ORDINARY = "called once", "ordinary"  # in place of a plan: none yet, none possible

_run, _tune, _bench = JITFunction.run, Autotuner.run, Autotuner._bench
_recording = threading.Lock()  # held while a call is recorded
_recorder: Recorder | None = None


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its calls recorded by signature, and replayed.

    Its results must be new tensors, which depend on nothing but the arguments.
    """
    plans: dict[Any, Plan | str] = {}

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _is_plain():
            return function(*args, **kwargs)
        values = (*args, *kwargs.values())
        try:
            key = _signature(values, kwargs)
            plan = plans.get(key)
        except (RuntimeError, TypeError):  # a tensor without strides, an option without hash: for `function` to refuse
            return function(*args, **kwargs)
        if key is None or plan == _ORDINARY:
            return function(*args, **kwargs)
        inputs = [value for value in values if isinstance(value, Tensor)]
        if isinstance(plan, Plan):
            return plan(inputs)
        if plan == _CALLED_ONCE:
            result, plans[key] = _record(function, args, kwargs, inputs)
            return result
        result = function(*args, **kwargs)  # raises where the arguments are refused
        if len(plans) == _MOST_PLANS:
            plans.clear()
        plans[key] = _CALLED_ONCE
        return result

    return call


def is_recording() -> bool:
    """Return whether this thread's call is being recorded."""
    return _recorder is not None and _recorder.thread == threading.get_ident()


def _is_plain() -> bool:
    """Return whether nothing but torch's and Triton's ordinary execution observes calls.

    The private functions of torch._C are those of torch 2.13.
    """
    return (
        JITFunction.run is _run
        and Autotuner.run is _tune
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
        and not getattr(knobs.runtime.launch_enter_hook, "calls", knobs.runtime.launch_enter_hook)
        and not getattr(knobs.runtime.launch_exit_hook, "calls", knobs.runtime.launch_exit_hook)
    )


def _signature(values: Sequence[Any], names: Any) -> tuple[Any, ...] | None:
    """Return what the host's work for a call depends on; None if autograd or a subclass of tensors takes part."""
    differentiates = torch.is_grad_enabled()
    parts: list[Any] = [*names]
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if differentiates and value.requires_grad:
                return None
            parts += value.dtype, value.shape, value.stride(), value.device, value.data_ptr() & _ALIGNMENT
        elif isinstance(value, Tensor):
            return None
        else:
            parts += kind, value  # the type too: 1, 1.0 and True are equal keys
    return tuple(parts)


def _record(function: Callable[..., Any], args: Any, kwargs: Any, inputs: list[Tensor]) -> tuple[Any, Plan | str]:
    """Return the result of an ordinary call, and its plan or what stands for it."""
    global _recorder
    if len(set(map(id, inputs))) < len(inputs):  # one tensor in two arguments: addresses don't show which is meant
        return function(*args, **kwargs), _CALLED_ONCE
    if not _recording.acquire(blocking=False):  # another thread records
        return function(*args, **kwargs), _CALLED_ONCE
    recorder = _recorder = Recorder(inputs)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = _run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        if is_recording():
            recorder.launch(kernel, compiled, grid, args, kwargs)
        return compiled

    def bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.problem = "an autotuner timed its configurations"
        return _bench(tuner, *args, **kwargs)

    try:
        JITFunction.run, Autotuner._bench = run, bench
        with recorder:
            result = function(*args, **kwargs)
        return result, recorder.plan(result)
    finally:
        JITFunction.run, Autotuner._bench = _run, _bench
        _recorder = None
        _recording.release()


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a step: one of the inputs, which come first, or of the operators' results."""

    index: int


@dataclass(frozen=True)
class _Step:
    """``run`` takes all tensors by slot and adds its own; it needs those in ``reads``.

    ``writes``: the slots that it adds; None for a step that changes tensors, which a plan always keeps.
    """

    run: Callable[[list[Any]], None]
    reads: frozenset[int]
    writes: tuple[int, ...] | None = None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one call: while it is active, torch's operators and Triton's launches are noted as steps."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.thread = threading.get_ident()
        self.problem = ""
        self._tensors = list(inputs)  # by slot; kept, because the slots are known by the tensors' ids
        self._slots = {id(tensor): slot for slot, tensor in enumerate(inputs)}
        self._kept: list[Tensor] = []
        self._owners = list(range(len(inputs)))  # by slot: the slot of the tensor whose memory it views
        self._steps: list[_Step] = []
        self._launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _DEPENDENT.intersection(func.tags):
            self.problem = f"{func} depends on the contents of a tensor"
        if func is torch.ops.aten.detach.default and id(args[0]) in self._slots:  # `torch.empty` ends with one
            self._slots[id(result)] = self._slots[id(args[0])]
            self._kept.append(result)
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        (args, kwargs), reads = self._with_slots((args, kwargs))
        writes = tuple(self._slot_of_result(tensor, given) for tensor in outputs)
        if func in _EMPTY:
            run = _allocation(outputs[0], writes[0])
        else:
            run = _operation(func, args, kwargs, writes)
        self._steps.append(_Step(run, reads, None if func._schema.is_mutable else writes))
        return result

    def launch(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Note a launch of a kernel."""
        if compiled is None or kernel.pre_run_hooks:
            self.problem = "a launch has no compiled kernel, or a hook"
            return
        known = {name: value for name, value in kwargs.items() if name in kernel.arg_names}  # others are num_warps etc.
        bound = kernel.signature.bind(*args, **known)
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        values, pointers, descriptors = list(bound.arguments.values()), [], []
        for position, value in enumerate(values):
            if isinstance(value, TensorDescriptor):
                values[position] = vars(value) | {"base": value.base.dtype}  # a plan keeps no memory
                descriptors.append((position, *self._address(value.base)))
            elif isinstance(value, Tensor):
                values[position] = value.dtype
                pointers.append((position, *self._address(value)))
            elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                self.problem = "a tuple of tensors is an argument of a kernel"
        device = driver.active.get_current_device()
        run = _launching(compiled, (*sizes, 1, 1)[:3], device, values, pointers, descriptors)
        self._steps.append(_Step(run, frozenset(slot for _, slot, _ in (*pointers, *descriptors))))
        self._launches += 1

    def plan(self, result: Any) -> Plan | str:
        """Return the plan of the call, or `_ORDINARY`."""
        result, reads = self._with_slots(result)
        needed = set(reads)
        if self.problem or not self._launches:
            return _ORDINARY
        steps = []
        for step in reversed(self._steps):  # steps whose results nothing needs are dropped: views, most of them
            if step.writes is None or needed.intersection(step.writes):
                needed |= step.reads
                steps.append(step.run)
        first = self._tensors[0]
        return Plan(steps[::-1], len(self._tensors), result, first.device.index if first.is_cuda else None)

    def _with_slots(self, structure: Any) -> tuple[Any, frozenset[int]]:
        slots = []

        def slot(tensor: Tensor) -> _Slot:
            if id(tensor) not in self._slots:
                self.problem = "a tensor came from outside of the call"
            slots.append(self._slots.get(id(tensor), 0))
            return _Slot(slots[-1])

        return tree_map_only(Tensor, slot, structure), frozenset(slots)

    def _slot_of_result(self, tensor: Tensor, given: Sequence[Tensor]) -> int:
        if id(tensor) not in self._slots:
            memory = tensor.untyped_storage()._cdata
            viewed = [t for t in given if t.untyped_storage()._cdata == memory and id(t) in self._slots]
            slot = self._slots[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._owners.append(self._owners[self._slots[id(viewed[0])]] if viewed else slot)
        return self._slots[id(tensor)]

    def _address(self, tensor: Tensor) -> tuple[int, int]:
        """Return a tensor's address as the slot that owns its memory and the bytes behind that one's first element."""
        self._with_slots(tensor)
        owner = self._owners[self._slots.get(id(tensor), 0)]
        return owner, tensor.data_ptr() - self._tensors[owner].data_ptr()


def _allocation(tensor: Tensor, slot: int) -> Callable[[list[Any]], None]:
    size, stride, dtype, device = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    empty = torch.empty_strided

    def run(tensors: list[Any]) -> None:
        tensors[slot] = empty(size, stride, dtype=dtype, device=device)

    return run


def _operation(operator: Any, args: Any, kwargs: Any, writes: Sequence[int]) -> Callable[[list[Any]], None]:
    def run(tensors: list[Any]) -> None:
        given, named = tree_map_only(_Slot, lambda slot: tensors[slot.index], (args, kwargs))
        outputs = [leaf for leaf in tree_leaves(operator(*given, **named)) if isinstance(leaf, Tensor)]
        for slot, output in zip(writes, outputs, strict=True):
            tensors[slot] = output

    return run


def _launching(
    compiled: Any,
    grid: tuple[int, int, int],
    device: int,
    template: Sequence[Any],
    pointers: Sequence[tuple[int, int, int]],
    descriptors: Sequence[tuple[int, int, int]],
) -> Callable[[list[Any]], None]:
    """Return a launch, as `JITFunction.run` of Triton 3.6 to 3.9 ends; their launcher takes addresses as integers."""
    launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream = driver.active.get_current_stream

    def run(tensors: list[Any]) -> None:
        values = list(template)
        for position, slot, offset in pointers:
            values[position] = tensors[slot].data_ptr() + offset
        for position, slot, offset in descriptors:
            descriptor = TensorDescriptor.__new__(TensorDescriptor)  # its `__init__` would check all again, in 3 us
            descriptor.__dict__ = template[position] | {"base": _Address(tensors[slot].data_ptr() + offset)}
            values[position] = descriptor
        # None: no launch metadata, and no hooks on enter and exit; `_is_plain` has seen that there are none
        launch(*grid, stream(device), function, metadata, None, None, None, *values)

    return run


class _Address:
    """What Triton's launcher asks of the tensor in a descriptor."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Plan:
    """The steps of a call. ``result`` has a slot for each tensor; ``device`` is the GPU, None without one."""

    def __init__(
        self, steps: Sequence[Callable[[list[Any]], None]], size: int, result: Any, device: int | None
    ) -> None:
        self._steps, self._size, self._device = tuple(steps), size, device
        if isinstance(result, _Slot):
            self._result: Callable[[list[Any]], Any] = itemgetter(result.index)
        elif isinstance(result, tuple) and len(result) > 1 and all(isinstance(each, _Slot) for each in result):
            self._result = itemgetter(*(each.index for each in result))
        else:
            self._result = lambda tensors: tree_map_only(_Slot, lambda slot: tensors[slot.index], result)

    def __call__(self, inputs: list[Tensor]) -> Any:
        """Run the steps on tensors of the recorded signature; return the result."""
        if self._device is not None and torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):  # Triton and CUDA launch on the current device
                return self(inputs)
        tensors: list[Any] = inputs + [None] * (self._size - len(inputs))
        for step in self._steps:
            step(tensors)
        return self._result(tensors)
