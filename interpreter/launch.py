"""Launching a kernel on the interpreter: arguments typed as a GPU launch does, then one program after another."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, _normalize_ty
from triton.tools.tensor_descriptor import TensorDescriptor

from assay.interpreter import compiled_callers, kernels
from assay.interpreter.blame import own_error
from assay.interpreter.builder import TARGET
from assay.interpreter.faults import SanitizerError
from assay.interpreter.handles import handle_of
from assay.interpreter.launched import Launched
from assay.interpreter.patches import language
from assay.interpreter.places import true_device
from assay.interpreter.replacing import Shared
from assay.interpreter.sanitizer import Launch
from assay.interpreter.tuning import pick_config, pretended_timing
from assay.runtime.environment import standard_environment

_one_at_a_time = threading.RLock()  # the place in the grid is the builder's
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # CUDA C++ Programming Guide, technical specifications: grid of blocks


def launch(owner: Any, arguments: Sequence[Any], keywords: dict[str, Any], grid: Any) -> None:
    """Run every program of ``grid`` of a `JITFunction` or `InterpretedFunction`, inside `language`.

    Keywords that are no parameters (num_warps and the like) are ignored, as the compiler consumes them. Raises
    `InterpreterError`, naming the program, for what goes wrong inside, and `NotInterpreted` for what is missing here.
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
    sanitizer, programs = builder.sanitizer, int(np.prod(sizes, dtype=np.int64))
    with (
        _one_at_a_time,
        standard_environment(),  # a GPU knows nothing of the processor's flags
        np.errstate(all="ignore"),
        sanitizer.launching(function.__name__, programs) if sanitizer else contextlib.nullcontext() as checked,
    ):
        typed = {
            name: value if name in executor.constexprs else tensor_argument(value, annotations.get(name), name, checked)
            for name, value in bound.items()
        }
        outer = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
        builder.set_grid_dim(*sizes)
        builder.warps = warps
        try:
            for place in np.ndindex(*sizes):
                builder.set_grid_idx(*place)
                if checked is not None:
                    checked.begin(place)
                run(**typed)
        except (InterpreterError, SanitizerError):
            raise
        except Exception as error:
            where = f"(in program {place} of {function.__name__})"
            with language.suspended():
                raise own_error(owner, bound, error, where, TARGET) from error
        finally:
            builder.grid_dim, builder.grid_idx = outer
    if on_device:
        executor._restore_args_dev(arguments, host, keywords, host_keywords)


def tensor_argument(value: Any, annotation: Any = None, name: str = "", checked: Launch | None = None) -> Any:
    """An argument as a launch types it: by its annotation; else float is float32, bool int1, an int by its size.

    Pointers are marked as those of the argument ``name`` where their use is ``checked``.
    """
    if isinstance(value, tl.constexpr):
        return value.value
    if type(value) is tuple:
        return tl.tuple([tensor_argument(part, None, name, checked) for part in value])
    if isinstance(value, (bool, int, float)):
        dtype = _annotated(annotation) or _scalar_type(value)
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


def _annotated(annotation: Any) -> Any:
    """The scalar type that a parameter's annotation demands, such as ``tl.int64`` or "i64", or None."""
    if annotation is None:
        return None
    name = _normalize_ty(annotation)
    numeric = isinstance(name, str) and re.fullmatch(r"(u?i|u|fp|bf)\d+", name)
    return tl.str_to_ty(name, None) if numeric else None


def _run(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Launched:
    def start(arguments: Sequence[Any], keywords: dict[str, Any], grid: Any) -> None:
        with language:
            launch(self, arguments, keywords, grid)

    if not warmup:
        start(args, kwargs, grid)
    return Launched(self, args, kwargs, start)


def _run_tuned(self: Any, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    try:
        self.best_config = config = pick_config(self, kwargs)
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())
    finally:
        self.nargs = None


def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
    """What a subclass of `Autotuner` with a ``run`` of its own measures: the configuration to be picked is quickest."""
    nargs = self.nargs or dict(zip(self.arg_names, args, strict=False))
    return pretended_timing(self, config, nargs, meta)


launches = Shared(
    lambda: [
        (JITFunction, "run", compiled_callers.untraced(_run)),
        (InterpretedFunction, "run", compiled_callers.untraced(_run)),
        (Autotuner, "run", compiled_callers.untraced(_run_tuned)),
        (Autotuner, "_bench", _bench),
        *compiled_callers.changes(),
    ]
)
"""Inside it, whatever is launched is interpreted."""


def _grid(grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    sizes = grid(bound) if callable(grid) else grid
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"grid: expected one to three numbers of programs, got {sizes!r}")
    sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
    for axis, (size, most) in enumerate(zip(sizes, _MOST_PROGRAMS, strict=True)):
        if size > most:
            raise ValueError(f"grid: axis {axis} has {size} programs; a GPU takes at most {most}")
    return sizes[0], sizes[1], sizes[2]


def _is_on_device(argument: Any) -> bool:
    """Whether an argument is, or holds, a tensor that must be copied to the host."""
    if isinstance(argument, tuple):
        return any(map(_is_on_device, argument))
    tensor = getattr(argument, "base", argument)  # of a descriptor, or of a tensor seen as another dtype
    return isinstance(tensor, torch.Tensor) and true_device(tensor).type != "cpu"
