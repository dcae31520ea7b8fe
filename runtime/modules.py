"""Imports by name: names of a package on first use, optional packages, and modules that a user names."""

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
    """Return ``__getattr__`` and ``__dir__`` that defer a package's imports under ``if TYPE_CHECKING`` to first use."""
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
    """Import an optional package's module. Raises NotInstalled, with the purpose and the extra that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == package else f" ({error})"
        raise NotInstalled(f"{purpose} needs {package}{why}: pip install 'kernel-assay[{extra}]'") from None


def import_users_module(name: str, what: str, error: type[AssayError]) -> ModuleType:
    """Import the module ``name``, ``what`` in messages; raise ``error``, with a remedy, if that fails."""
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
    """Return whether an error is due to a missing GPU: by its message, or the source line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    words = f"{error} {frames[-1].line if frames else ''}".lower()
    return any(part in words for part in ("cuda", "0 active drivers", "nvidia driver"))


def is_module(name: str) -> bool:
    """Return whether `import_users_module` would find a module; imports the packages above it, but not the module."""
    _look_here()
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # not a module name, or below a module that is no package
        return False


def importable(name: str) -> str:
    """Return the name by which a new process in this folder can import a loaded module.

    E.g. `tests.test_mine` for a file whose folder pytest has added to the path of this process only.
    """
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
