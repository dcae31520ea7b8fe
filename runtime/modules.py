"""Imports by name: a package's names on first use, optional packages, and modules that a user names."""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.runtime.errors import AssayError, NotInstalled


def lazy(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``: what it imports ``if TYPE_CHECKING`` is imported on first use."""
    module = sys.modules[package]
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module for node in imports for alias in node.names}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        exec(f"from {homes[name]} import {name}", vars(module))
        return vars(module)[name]

    return load, lambda: sorted({*vars(module), *homes})


def optional(module: str, *, purpose: str, extra: str) -> Any:
    """An optional package's module. Raises NotInstalled, which names what needs it and the extra that brings it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == package else f" ({error})"
        raise NotInstalled(f"{purpose} needs {package}{why}: pip install 'kernel-assay[{extra}]'") from None


def import_users_module(name: str, what: str, error: type[AssayError]) -> ModuleType:
    """The module called ``name``; ``error`` says of ``what`` why it can't be imported, and what would mend it."""
    _look_here()
    try:
        return import_module(name)
    except Exception as cause:
        missing = cause.name if isinstance(cause, ModuleNotFoundError) and cause.name else name
        is_own = missing.partition(".")[0] == name.partition(".")[0]
        hint = "modules of the current folder and of PYTHONPATH count" if is_own else f"it needs {missing}"
        if asks_for_cuda(cause):
            hint = "it asks for CUDA, which isn't here; --pretend cuda, or import it inside pretend_cuda()"
        raise error(f"{what}: {name} can't be imported ({type(cause).__name__}: {cause}); {hint}") from None


def asks_for_cuda(error: BaseException) -> bool:
    """Whether an error is that there is no GPU: by its words, or those of the line that it arose in."""
    frames = traceback.extract_tb(error.__traceback__)
    words = f"{error} {frames[-1].line if frames else ''}".lower()
    return any(part in words for part in ("cuda", "0 active drivers", "nvidia driver"))


def is_module(name: str) -> bool:
    """Whether `import_users_module` would find a module of that name; it isn't imported, the packages above it are."""
    _look_here()
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # no name of a module, or one below what is none
        return False


def importable(name: str) -> str:
    """The name by which a new process in this folder imports a loaded module: `tests.test_mine` for the file of a
    folder that pytest has put on the path of this process alone."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or "." in name:
        return name
    folder = Path(file).resolve().parent
    known = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sysconfig.get_paths().values()]
    if not folder.is_relative_to(Path.cwd()) or folder in (Path(path).resolve() for path in known):
        return name
    parts = (*folder.relative_to(Path.cwd()).parts, name)
    return ".".join(parts) if all(part.isidentifier() for part in parts) else name


def _look_here() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
