"""Importing what a user names: a module of the current folder, of PYTHONPATH, or of an installed distribution."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from assay.runtime.errors import AssayError


def import_own(name: str, what: str, error: type[AssayError]) -> ModuleType:
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
    """Whether `import_own` would find a module of that name; it isn't imported, the packages above it are."""
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
