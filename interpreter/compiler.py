"""Questions to the front end of Triton's compiler, which needs no GPU: does it accept a kernel, a configuration?

An error inside of an interpreted kernel is the kernel's if the compiler refuses the kernel too (types, shapes), or if
it would occur on a GPU (an assertion, an index beyond its tensor). If the compiler accepts the kernel, the interpreter
lacks something. What Triton's language itself does not implement, or has removed, is the installed version's.
"""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.autotuner import Heuristics
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction, mangle_type

from assay.interpreter.builder import TARGET
from assay.interpreter.errors import NotInterpreted
from assay.interpreter.language import language
from assay.runtime.errors import one_line

_AT_RUN_TIME = (AssertionError, IndexError, ZeroDivisionError, MemoryError)
_INTERPRETERS = ("assay.interpreter", "triton.runtime.interpreter")
_accepted: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def attributed_error(owner: Any, bound: Mapping[str, Any], error: Exception, location: str) -> Exception:
    """Return `InterpreterError` for an ``error`` that is the kernel's, `NotInterpreted` for one of the interpreter.

    ``bound`` are the launch's arguments by name, ``location`` the program and kernel. Call it outside of `language`.
    """
    if isinstance(error, NotInterpreted):
        return NotInterpreted(f"{one_line(error)} {location}")
    message = f"{type(error).__name__}: {one_line(error)} {location}"
    if isinstance(error, NotImplementedError):
        module = _raised_in(error)
        if module.startswith(_INTERPRETERS):
            return NotInterpreted(f"the interpreter can't do this: {one_line(error)} {location}")
        if module.startswith("triton.language"):
            return NotInterpreted(f"Triton {triton.__version__} can't do this: {one_line(error)} {location}")
    if isinstance(error, _AT_RUN_TIME) or not compiles(owner, bound, TARGET):
        return InterpreterError(message)
    return NotInterpreted(f"the interpreter fails where Triton's compiler does not: {message}")


def compiles(owner: Any, bound: Mapping[str, Any], target: GPUTarget) -> bool:
    """Return whether the front end accepts a kernel with these arguments."""
    if not isinstance(owner, JITFunction):  # defined under TRITON_INTERPRET=1: nothing to compile
        return False
    try:
        backend = make_backend(target)
        options = backend.parse_options({"enable_fp_fusion": True})  # explicit: Triton 3.9 warns about the default
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        ASTSource(owner, *signature_of(owner, bound)).make_ir(target, options, functions, modules, context)
    except Exception:  # any error is a refusal
        return False
    return True


def signature_of(owner: Any, bound: Mapping[str, Any]) -> tuple[dict[str, str], dict[tuple[int], Any]]:
    """Return the types and the constants that a kernel is compiled for with these arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    for parameter in owner.params:
        value = bound[parameter.name]
        specialized = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or specialized:
            signature[parameter.name], constants[(parameter.num,)] = "constexpr", value
        else:
            signature[parameter.name] = parameter.annotation_type or mangle_type(value)
    return signature, constants


def _raised_in(error: BaseException) -> str:
    """Return the name of the module in which an error was raised."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1]) if frames else ""


def pick_config(tuner: Any, keywords: dict[str, Any]) -> Any:
    """Return the configuration of an autotuned launch, without a GPU to time them: by a hash of the tuning key.

    Over many keys all configurations come up. One that the compiler refuses, as by a failing ``tl.static_assert``, is
    no candidate, as on a GPU it counts as infinitely slow (`triton.runtime.autotuner.Autotuner`).
    """
    configs = _candidates(tuner, keywords)
    return configs[_index(tuner, configs, tuner.nargs, keywords)]


def pretended_timing(tuner: Any, config: Any, nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[float]:
    """Return the made-up times of a configuration: the one to be picked is fastest, then those after it."""
    configs = _candidates(tuner, keywords) if tuner.nargs else tuner.configs
    index = configs.index(config) if config in configs else 0
    time = 1.0 + (index - _index(tuner, configs, nargs, keywords)) % len(configs)
    return [time, time, time]


def _candidates(tuner: Any, keywords: Mapping[str, Any]) -> Sequence[Any]:
    """Return the configurations left by the tuner's own pruning, without duplicates."""
    return list(dict.fromkeys(tuner.prune_configs(dict(keywords)) or tuner.configs))


def _index(tuner: Any, configs: Sequence[Any], nargs: Mapping[str, Any], keywords: Mapping[str, Any]) -> int:
    """Return the hashed index, or the next one that compiles; the hashed index if none does."""
    values = {**nargs, **keywords}
    key = [values[name] for name in tuner.keys if name in values]
    key += [str(value.dtype) for value in values.values() if isinstance(value, torch.Tensor)]
    first = zlib.crc32(repr(key).encode()) % len(configs)
    kernel = tuner.fn
    while not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if len(configs) > 1 and isinstance(kernel, JITFunction) and "static_assert" in kernel.src:
        for step in range(len(configs)):
            if _is_accepted(kernel, _bound(tuner, configs[(first + step) % len(configs)], values)):
                return (first + step) % len(configs)
    return first


def _is_accepted(kernel: Any, bound: Mapping[str, Any]) -> bool:
    """Whether the compiler accepts a kernel with these arguments; cached by their types and constants."""
    try:
        key = repr(signature_of(kernel, bound))
    except Exception:  # the compiler would fail likewise
        return False
    accepted = _accepted.setdefault(kernel.fn, {})
    if key not in accepted:
        with language.suspended():
            accepted[key] = compiles(kernel, bound, TARGET)
    return accepted[key]


def _bound(tuner: Any, config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel's arguments by name, including those of heuristics and defaults."""
    arguments, inner = {**values, **config.all_kwargs()}, tuner.fn
    while not isinstance(inner, JITFunction):
        if isinstance(inner, Heuristics):
            arguments |= {name: heuristic(arguments) for name, heuristic in inner.values.items()}
        inner = inner.fn
    return {parameter.name: parameter.default for parameter in inner.params if parameter.has_default} | arguments
