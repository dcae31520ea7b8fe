"""Whose fault it is that a program didn't end: the kernel's, the interpreter's own, or that of the Triton it runs in.

What a kernel does wrong, Triton's compiler refuses as well (types, shapes), or it is wrong on a GPU too (an assertion,
an index beyond its tensor). What Triton's language says it hasn't implemented, or has no more, is the version's. Any
other error is put to the compiler's front end, which needs no GPU: if that takes the kernel, the kernel is right and
the interpreter lacks something.
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

from assay.interpreter.faults import NotInterpreted
from assay.runtime.errors import one_line

_WHERE_IT_RUNS = (AssertionError, IndexError, ZeroDivisionError, MemoryError)
_OURS = ("assay.interpreter", "triton.runtime.interpreter")


def own_error(owner: Any, bound: Mapping[str, Any], error: Exception, place: str, target: GPUTarget) -> Exception:
    """What to raise for an ``error`` inside of a kernel: `InterpreterError` where it is the kernel's, `NotInterpreted`
    where it is the interpreter's.

    ``bound`` are the launch's arguments by name, ``place`` says which program of which kernel it was.
    To be called outside of `assay.interpreter.patches.language`.
    """
    if isinstance(error, NotInterpreted):
        return NotInterpreted(f"{one_line(error)} {place}")
    message = f"{type(error).__name__}: {one_line(error)} {place}"
    if isinstance(error, NotImplementedError) and _arose_in(error).startswith(_OURS):
        return NotInterpreted(f"the interpreter can't do this: {one_line(error)} {place}")
    if isinstance(error, NotImplementedError) and _arose_in(error).startswith("triton.language"):
        return NotInterpreted(f"Triton {triton.__version__} can't do this: {one_line(error)} {place}")
    if isinstance(error, _WHERE_IT_RUNS) or not compiles(owner, bound, target):
        return InterpreterError(message)
    return NotInterpreted(f"the interpreter fails where Triton's compiler does not: {message}")


def compiles(owner: Any, bound: Mapping[str, Any], target: GPUTarget) -> bool:
    """Whether the front end of Triton's compiler takes a kernel with these arguments."""
    if not isinstance(owner, JITFunction):  # defined under TRITON_INTERPRET=1: nothing to compile
        return False
    try:
        backend = make_backend(target)
        options = backend.parse_options({"enable_fp_fusion": True})  # by default it warns
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        ASTSource(owner, *signature_of(owner, bound)).make_ir(target, options, functions, modules, context)
    except Exception:  # the compiler's word, whatever it is
        return False
    return True


def signature_of(owner: Any, bound: Mapping[str, Any]) -> tuple[dict[str, str], dict[tuple[int], Any]]:
    """The types and the constants that a kernel is compiled for with these arguments."""
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


def _arose_in(error: BaseException) -> str:
    """The module in which an error was raised."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1]) if frames else ""
