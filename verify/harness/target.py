"""Kernels by importable name, ``package.module:function``, and the name of a kernel.

For a kernel whose arguments aren't the op's, a lambda adapts them: ``package.module:lambda x: softmax(x, -1)``, in
whose body the names of the module, and torch, are defined.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from assay.runtime.errors import unknown
from assay.runtime.modules import import_users_module
from assay.runtime.results import installed_version
from assay.verify.errors import TargetError

_LAMBDA = "lambda"


def load_target(target: str) -> Callable[..., Any]:
    """Return the kernel ``package.module:function``, or a lambda in a module's names; the current folder is searched
    too.

    Raises `TargetError`.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise TargetError(f"target {target!r}; expected package.module:function")
    result: Any = import_users_module(module_name, f"target {target!r}", TargetError)
    if is_adapter(target):
        return _adapter(name, result, target)
    for part in name.split("."):
        if not hasattr(result, part):
            raise TargetError(
                f"target {target!r}: {unknown('function', part, [n for n in dir(result) if n[0] != '_'][:20])}"
            )
        result = getattr(result, part)
    if not callable(result):
        raise TargetError(f"target {target!r} is a {type(result).__name__}, which can't be called")
    return result


def is_adapter(target: str) -> bool:
    """Whether a target is a lambda and not a name."""
    return target.partition(":")[2].startswith(_LAMBDA)


def _adapter(expression: str, module: ModuleType, target: str) -> Callable[..., Any]:
    """Return the lambda, evaluated among the names of the module and torch."""
    try:
        result = eval(compile(expression, "<adapter>", "eval"), {"torch": torch, **vars(module)})
    except SyntaxError as error:
        raise TargetError(f"target {target!r}: {error.msg}; expected module:lambda x: function(x)") from None
    adapter: Callable[..., Any] = result
    adapter.__name__ = adapter.__qualname__ = expression  # as errors and reports call it
    return adapter


def target_of(kernel: Callable[..., Any]) -> str:
    """Return ``module:name`` if the kernel can be imported by it, else an empty string."""
    module, name = getattr(kernel, "__module__", None), getattr(kernel, "__qualname__", "")
    if not module or "<" in name or module == "__main__":
        return ""
    result: Any = sys.modules.get(module)
    for part in name.split("."):
        result = getattr(result, part, None)
    return f"{module}:{name}" if result is kernel else ""


def source_of(kernel: Callable[..., Any]) -> str:
    """Return ``file:line`` of the kernel's source, relative to the current folder if it is below it.

    Empty if the source isn't Python.
    """
    result: Any = kernel
    while isinstance(result, partial):
        result = result.func
    result = inspect.unwrap(getattr(result, "fn", result))  # what Triton compiles or tunes keeps its function there
    if not (inspect.isroutine(result) or inspect.isclass(result)):
        result = type(result)
    try:
        file, line = inspect.getsourcefile(result), inspect.getsourcelines(result)[1]
    except (OSError, TypeError):
        return ""
    path = Path(file or "")
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"


def about(kernel: Callable[..., Any], device: str, pretend: str = "") -> dict[str, str]:
    """Return the facts of an examination made now, by name; the kernel's source if it is Python.

    ``pretend`` is the device that the kernel is made to see.
    """
    source, is_gpu = source_of(kernel), torch.device(device).type == "cuda"
    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    try:
        name = torch.cuda.get_device_name(device) if is_gpu else processor
    except RuntimeError:  # a kernel has taken it from this process
        name = "a GPU that is lost"
    packages = {"assay": "kernel-assay", "torch": "torch", "triton": "triton"}
    versions = {name: installed_version(package) for name, package in packages.items()}  # empty if not installed
    return {
        **({"source": source} if source else {}),
        "device": f"{device}, {name}" + (f", pretending to be {pretend}" if pretend else ""),
        "versions": ", ".join(
            f"{name} {n}" for name, n in {"Python": platform.python_version(), **versions}.items() if n
        ),
        "date": datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    }
