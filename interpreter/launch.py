"""Launching a kernel on the interpreter: arguments typed as in a GPU launch, then one program after another.

The order of programs is that of the call's `Assignment`. A program that waits for another, by atomics on one address
again and again, lets the next one run meanwhile (only where the launch is sanitized).

A launch returns a `Launched`, as Triton returns a `CompiledKernel`. Inside functions that `torch.compile` compiled, a
launch is an operator of the graph; a graph with one runs operator by operator, others are compiled as always.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils import _triton
from triton import knobs
from triton.runtime import interpreter as plain
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, MockTensor, _normalize_ty
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.formats.devices import DEFAULT_CUDA_DEVICE, cuda_device_named
from assay.interpreter import kernels
from assay.interpreter.assignment import current, most_programs, program_order
from assay.interpreter.compiler import attributed_error
from assay.interpreter.configurations import REFUSALS, in_one_line, pick_config, pretended_timing, program_of
from assay.interpreter.errors import DependentPrograms, SanitizerError
from assay.interpreter.fake_cuda.driver import changes as driver_changes
from assay.interpreter.fake_cuda.tensors import true_device
from assay.interpreter.fake_cuda.world import pretended
from assay.interpreter.language import language
from assay.interpreter.operators import handle_of
from assay.interpreter.races import arranged, sampled
from assay.interpreter.replacing import Change, Shared, replaced
from assay.interpreter.sanitizer import Launch
from assay.runtime.environment import standard_environment

_launch_lock = threading.RLock()  # program ids are attributes of the one builder
compiling_run = JITFunction.run
_MAX_GRID = (2**31 - 1, 65535, 65535)  # CUDA C++ Programming Guide, technical specifications: grid of blocks
_RUN_PREFIX = 9  # arguments of CompiledKernel.run before the kernel's: grid (3), stream, function, 2 metadata, 2 hooks
_REGISTERS, _MAX_THREADS, _WARP = 65536, 1024, 32
_GRAPH_LAUNCHES = ("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional")


def launch(owner: Any, arguments: Sequence[Any], keywords: dict[str, Any], grid: Any) -> None:
    """Run every program of ``grid`` of a `JITFunction` or `InterpretedFunction`, inside `language`.

    Keywords that are no parameters (num_warps and the like) are compiler options and ignored. Raises `InterpreterError`
    with the program for an error of the kernel, `NotInterpreted` for one of the interpreter.
    """
    function = owner.fn
    names = inspect.signature(function).parameters
    warps = keywords.get("num_warps") or 4
    keywords = {name: value for name, value in keywords.items() if name in names}
    executor = plain.GridExecutor(function, list(names), grid, [])
    host, host_keywords = arguments, keywords
    on_device = any(_is_on_device(argument) for argument in (*arguments, *keywords.values()))
    if on_device:
        host, host_keywords = executor._init_args_hst(arguments, keywords)
    for hook in owner.pre_run_hooks:
        hook(*host, **host_keywords)
    bound = inspect.getcallargs(function, *host, **host_keywords)
    sizes = _grid(grid, bound)
    annotations = inspect.get_annotations(function)
    run, builder = kernels.runnable(owner), kernels.builder
    sanitizer, num_programs = builder.sanitizer, int(np.prod(sizes, dtype=np.int64))
    with (
        _launch_lock,
        standard_environment(),  # a GPU has no processor flags (flush-to-zero and the like)
        np.errstate(all="ignore"),
        sanitizer.launching(function.__name__, num_programs) if sanitizer else contextlib.nullcontext() as checked,
    ):
        typed = {
            name: value if name in executor.constexprs else tensor_argument(value, annotations.get(name), name, checked)
            for name, value in bound.items()
        }
        outer = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
        builder.set_grid_dim(*sizes)
        builder.warps = warps
        program: tuple[int, ...] = (0, 0, 0)
        begun: set[tuple[int, ...]] = set()
        if checked is not None and 0 < most_programs() < num_programs:
            programs = ascending_programs = sampled(sizes, most_programs())
            checked.sample()
        else:
            programs, ascending_programs = arranged(sizes, program_order()), arranged(sizes, 0)
        ascending = iter(ascending_programs)

        def run_program(next_program: tuple[int, ...]) -> None:
            nonlocal program
            waiting, program = program, next_program
            begun.add(program)
            builder.set_grid_idx(*program)
            if checked is not None:
                checked.begin(program)
            run(**typed)
            program = waiting
            builder.set_grid_idx(*program)

        def run_another() -> None:
            """Run the first program that hasn't begun: those that wait do so for others before them."""
            first = next((other for other in ascending if other not in begun), None)
            if first is not None:
                run_program(first)

        if checked is not None and num_programs > 1:
            checked.let_another_run = run_another
        try:
            for next_program in programs:
                if next_program not in begun:
                    run_program(next_program)
            if checked is not None:
                checked.end()
        except (DependentPrograms, InterpreterError, SanitizerError):
            raise
        except Exception as error:
            location = f"(in program {program} of {function.__name__})"
            with language.suspended():
                raise attributed_error(owner, bound, error, location) from error
        finally:
            builder.grid_dim, builder.grid_idx = outer
    if on_device:
        executor._restore_args_dev(arguments, host, keywords, host_keywords)


def tensor_argument(value: Any, annotation: Any = None, name: str = "", checked: Launch | None = None) -> Any:
    """Type an argument as a launch does: by annotation, else float as float32, bool as int1, int by its size.

    With ``checked``, pointers are tagged as belonging to the argument ``name``.
    """
    if isinstance(value, tl.constexpr):
        return value.value
    if type(value) is tuple:
        return tl.tuple([tensor_argument(part, None, name, checked) for part in value])
    if isinstance(value, (bool, int, float)):
        dtype = _annotated_type(annotation) or _scalar_type(value)
        return tl.tensor(handle_of(np.array([value], np.float64 if dtype.is_floating() else None), dtype), dtype)
    if isinstance(value, np.generic):
        raise TypeError(f"a launch takes no numpy.{type(value).__name__}; pass a Python number")
    argument = plain._implicit_cvt(value)
    if checked is not None and hasattr(value, "data_ptr"):
        argument.handle.data |= checked.tag(name, value)
    elif checked is not None and isinstance(value, TensorDescriptor):
        argument.handle.base.data |= checked.tag(name, value.base)
    return argument


def _scalar_type(value: Any) -> Any:
    if isinstance(value, bool):
        return tl.int1
    if isinstance(value, float):
        return tl.float32
    for dtype, low, high in ((tl.int32, -(2**31), 2**31), (tl.int64, -(2**63), 2**63), (tl.uint64, 0, 2**64)):
        if low <= value < high:
            return dtype
    raise OverflowError(f"{value} has more than 64 bits; a launch takes none of that size")


def _annotated_type(annotation: Any) -> Any:
    """Return the scalar type of a parameter's annotation such as ``tl.int64`` or "i64", or None."""
    if annotation is None:
        return None
    name = _normalize_ty(annotation)
    numeric = isinstance(name, str) and re.fullmatch(r"(u?i|u|fp|bf)\d+", name)
    return tl.str_to_ty(name, None) if numeric else None


def _grid(grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    sizes = grid(bound) if callable(grid) else grid
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"grid: expected one to three numbers of programs, got {sizes!r}")
    sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
    for axis, (size, most) in enumerate(zip(sizes, _MAX_GRID, strict=True)):
        if size > most:
            raise ValueError(f"grid: axis {axis} has {size} programs; a GPU takes at most {most}")
    return sizes[0], sizes[1], sizes[2]


def _is_on_device(argument: Any) -> bool:
    """Whether an argument is, or holds, a tensor that must be copied to the host."""
    if isinstance(argument, tuple):
        return any(map(_is_on_device, argument))
    tensor = getattr(argument, "base", argument)  # of a descriptor, or of a tensor reinterpreted as another dtype
    return isinstance(tensor, torch.Tensor) and true_device(tensor).type != "cpu"


class Launched:
    """A `JITFunction` with the constants and options of one launch; ``start(arguments, keywords, grid)`` launches.

    Libraries keep it (FlagGems' `LibEntry`), call it with a grid of their own (Triton's tutorial on fused softmax) or
    read its registers; attributes other than launching come from compiling the kernel for the emulated device.
    """

    function = packed_metadata = module = None

    def __init__(
        self, owner: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], start: Callable[..., None]
    ) -> None:
        parameters = getattr(owner, "params", ())  # an InterpretedFunction has none; nobody keeps its result
        names = [parameter.name for parameter in parameters]
        self._owner, self._start = owner, start
        values = {**dict(zip(names, arguments, strict=False)), **keywords}
        constant = {parameter.name for parameter in parameters if parameter.is_constexpr}
        self._constants = {name: value for name, value in values.items() if name in constant}
        self._options = {name: value for name, value in values.items() if name not in names}
        self._mocks = {
            name: value if isinstance(value, (int, float, str, type(None))) or name in constant else _mock(value)
            for name, value in values.items()
        }
        self._names, self._varying = names, [name for name in names if name not in constant]
        self.name = owner.fn.__name__

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return a function that launches the kernel with all parameters in order, or with all but the constants."""

        def launch(*arguments: Any, stream: Any = None) -> None:
            self._launch(arguments, grid)

        return launch

    def run(self, *arguments: Any) -> None:
        """`CompiledKernel.run`: three grid sizes, six arguments of the driver, then the kernel's."""
        self._launch(arguments[_RUN_PREFIX:], arguments[:3])

    def _launch(self, arguments: Sequence[Any], grid: Any) -> None:
        if len(arguments) == len(self._varying):
            keywords = {**self._constants, **dict(zip(self._varying, arguments, strict=True))}
        elif len(arguments) == len(self._names):
            keywords = dict(zip(self._names, arguments, strict=True))
        else:
            raise TypeError(
                f"{self.name}: expected {len(self._names)} arguments, or {len(self._varying)} without constants, "
                f"got {len(arguments)}"
            )
        self._start((), {**self._options, **keywords}, grid)

    def launch_metadata(self, grid: Any, stream: Any, *arguments: Any) -> None:
        """None, as without launch hooks."""

    def _init_handles(self) -> None:
        """There is no binary to load."""

    @cached_property
    def _compiled(self) -> Any:
        """The kernel, compiled for the emulated device."""
        device = cuda_device_named(pretended() or DEFAULT_CUDA_DEVICE)
        owner, caches = self._owner, self._owner.device_caches
        owner.device_caches = defaultdict(owner.create_binder)  # keep this binary out of the user's caches
        try:
            with replaced(driver_changes(lambda: device)):
                return compiling_run(owner, grid=(1,), warmup=True, **self._mocks)
        finally:
            owner.device_caches = caches

    @cached_property
    def _usage(self) -> dict[str, int]:
        """Registers and bytes of local memory per thread, from NVIDIA's cuobjdump."""
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder, "kernel.cubin")
            binary.write_bytes(self._compiled.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", output)}

    @property
    def n_regs(self) -> int:
        return self._usage["REG"]

    @property
    def n_spills(self) -> int:
        """Spilled registers per thread, from the size of the stack that holds them."""
        return (self._usage["STACK"] + self._usage["LOCAL"]) // 4

    @property
    def n_max_threads(self) -> int:
        return min(_MAX_THREADS, _REGISTERS // max(self.n_regs, 1) // _WARP * _WARP)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled, name)


def _mock(value: Any) -> Any:
    """Return what the compiler reads of an argument, without its memory."""
    return MockTensor(value.dtype) if hasattr(value, "data_ptr") and not isinstance(value, MockTensor) else value


def _run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Launched:
    def start(arguments: Sequence[Any], keywords: dict[str, Any], grid: Any) -> None:
        with language:
            launch(self, arguments, keywords, grid)

    if not warmup:
        start(args, kwargs, grid)
    return Launched(self, args, kwargs, start)


def _run_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`Autotuner.run` without timing. A configuration that the compiler refuses on a device gives way to the next."""
    assignment = current()
    self.nargs = nargs = dict(zip(self.arg_names, args, strict=False))
    try:
        while True:
            _keep(self)
            self.best_config = config = pick_config(self, kwargs)
            if config.pre_hook is not None:
                config.pre_hook({**nargs, **kwargs, **config.all_kwargs()})
            try:
                if assignment is not None:
                    assignment.launched = program_of(self, config, {**nargs, **kwargs})
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except REFUSALS as error:
                self.nargs = nargs
                if assignment is None or not assignment.refuse(
                    *program_of(self, config, {**nargs, **kwargs}), in_one_line(error)
                ):
                    raise
            finally:
                if assignment is not None:
                    assignment.launched = None
    finally:
        self.nargs = None


def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    """`Autotuner._bench`, for subclasses with a ``run`` of their own (FlagGems' `LibTuner`)."""
    _keep(self)
    nargs = self.nargs or dict(zip(self.arg_names, args, strict=False))
    return pretended_timing(self, config, nargs, meta)


def _keep(tuner: Any) -> None:
    """Let a tuner forget what it learns from an assignment, once the assignment's call has ended."""
    assignment = current()
    if assignment is not None:
        assignment.restoring(tuner, lambda: _restorer(tuner))


def _restorer(tuner: Any) -> Callable[[], None]:
    own, cache = vars(tuner), getattr(tuner, "cache", None)
    before = {name: own[name] for name in ("best_config",) if name in own}
    known = dict(cache) if isinstance(cache, dict) else None

    def restore() -> None:
        own.pop("best_config", None)
        own.update(before)
        if known is not None:
            tuner.cache.clear()
            tuner.cache.update(known)

    return restore


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that `torch.compile` neither traces into nor runs inside of traced code.

    The compiler would trace the interpreter, or call its own compilation of the kernel for a GPU.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(before)

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # earlier torch
        frames.skip_code(call.__code__)
    else:  # torch 2.13
        action = frames._FrameAction
        frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
    call.__dict__["_torchdynamo_disable"] = True
    call.__dict__["_torchdynamo_disable_msg"] = "Triton kernels are interpreted"
    return call


def _compile_changes() -> list[Change]:
    wrapper: Any = torch._TorchCompileInductorWrapper
    has_triton = _triton.has_triton
    return [
        (wrapper, "__call__", _eager_if_launching(wrapper.__call__)),
        # Dynamo looks for launches in a function only if there is a GPU for Triton.
        (
            _triton,
            "has_triton",
            lambda: sys._getframe(1).f_globals.get("__name__") == "torch._dynamo.variables.builder" or has_triton(),
        ),
    ]


def _eager_if_launching(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, graph: Any, inputs: Any, **options: Any) -> Any:
        if any(map(_is_launch, _call_targets(graph))):
            disable: Any = torch.compiler.disable
            return disable(graph.forward)  # the called functions must not be traced either
        return original(self, graph, inputs, **options)

    return call


def _call_targets(graph: torch.fx.GraphModule) -> Iterator[Any]:
    """Yield the calls of a graph and of the graphs inside of it."""
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node.target for node in module.graph.nodes)


def _is_launch(target: Any) -> bool:
    """Whether a graph's target is a launch, or an operator made by `torch.library.triton_op`."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name in getattr(torch._library.triton, "triton_ops_to_kernels", {})
    return getattr(target, "_name", "") in _GRAPH_LAUNCHES


def _tuning_changes() -> list[Change]:
    return [(Autotuner, "run", untraced(_run_tuned)), (Autotuner, "_bench", _bench)]


launches = Shared(
    lambda: [
        (JITFunction, "run", untraced(_run)),
        (InterpretedFunction, "run", untraced(_run)),
        *_tuning_changes(),
        *_compile_changes(),
    ]
)
"""Inside it, every launch is interpreted."""

tuning = Shared(_tuning_changes)
"""Inside it, no autotuner times its configurations, and launches run on the device."""
