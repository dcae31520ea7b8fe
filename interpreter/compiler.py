"""Questions to the front end of Triton's compiler, which needs no GPU: does it accept a kernel?

An error inside of an interpreted kernel is the kernel's if the compiler refuses the kernel too (types, shapes), or if
it would occur on a GPU (an assertion, an index beyond its tensor). If the compiler accepts the kernel, the interpreter
lacks something. What Triton's language itself does not implement, or has removed, is the installed version's.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction, mangle_type

from assay.interpreter.builder import TARGET
from assay.interpreter.errors import NotInterpreted
from assay.runtime.errors import one_line

_AT_RUN_TIME = (AssertionError, IndexError, ZeroDivisionError, MemoryError)
_INTERPRETERS = ("assay.interpreter", "triton.runtime.interpreter")


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
