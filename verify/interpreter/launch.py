"""Launching a kernel on the interpreter: arguments typed as a GPU launch does, then one program after another."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.errors import InterpreterError

from assay.verify.interpreter import kernels
from assay.verify.interpreter.patches import interpreted_language

_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # CUDA C++ Programming Guide, technical specifications: grid of blocks


def launch(
    function: Any,
    arguments: Sequence[Any],
    keywords: dict[str, Any],
    grid: Any,
    hooks: Sequence[Callable[..., Any]] = (),
) -> None:
    """Run every program of ``grid`` of the kernel whose Python function is ``function``.

    Keywords that are no parameters (num_warps and the like) are ignored, as the compiler consumes them. Raises
    `InterpreterError`, naming the program, for what goes wrong inside.
    """
    names = inspect.signature(function).parameters
    keywords = {name: value for name, value in keywords.items() if name in names}
    executor = plain.GridExecutor(function, list(names), grid, [])
    if all(_on_cpu(argument) for argument in (*arguments, *keywords.values())):
        host, host_keywords = arguments, keywords
    else:
        host, host_keywords = executor._init_args_hst(arguments, keywords)
    for hook in hooks:
        hook(*host, **host_keywords)
    bound = inspect.getcallargs(function, *host, **host_keywords)
    sizes = _grid(grid, bound)
    builder = kernels.builder
    outer = getattr(builder, "grid_dim", None), getattr(builder, "grid_idx", None)
    with interpreted_language(), np.errstate(all="ignore"):
        typed = {
            name: value if name in executor.constexprs else tensor_argument(value) for name, value in bound.items()
        }
        run = kernels.runnable(function)
        builder.set_grid_dim(*sizes)
        try:
            for place in np.ndindex(*sizes):
                builder.set_grid_idx(*place)
                run(**typed)
        except InterpreterError:
            raise
        except Exception as error:
            message = f"{type(error).__name__}: {error} (in program {place} of {function.__name__})"
            raise InterpreterError(message) from error
        finally:
            builder.grid_dim, builder.grid_idx = outer
    if host is not arguments:
        executor._restore_args_dev(arguments, host, keywords, host_keywords)


def tensor_argument(value: Any) -> Any:
    """A kernel's argument as a launch types it: float is float32, bool is int1, int by its size, None stays None."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, bool):
        return tl.tensor(plain.TensorHandle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, float):
        return tl.tensor(kernels.builder.get_fp32(value), tl.float32)
    if type(value) is tuple:
        return tl.tuple([tensor_argument(part) for part in value])
    if isinstance(value, np.generic):
        raise TypeError(f"a launch takes no numpy.{type(value).__name__}; pass a Python number")
    return plain._implicit_cvt(value)


def pick_config(tuner: Any, keywords: dict[str, Any]) -> Any:
    """A configuration of an autotuned kernel, by a hash of its key: over many calls all of them come up."""
    configs = tuner.prune_configs(keywords) if tuner.early_config_prune else tuner.configs
    values = {**tuner.nargs, **keywords}
    key = [values[name] for name in tuner.keys if name in values]
    key += [str(value.dtype) for value in values.values() if isinstance(value, torch.Tensor)]
    return configs[zlib.crc32(repr(key).encode()) % len(configs)]


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


def _on_cpu(argument: Any) -> bool:
    return isinstance(argument, (int, float, str, type(None))) or (
        isinstance(argument, torch.Tensor) and argument.device.type == "cpu"
    )
