"""What is loaded on first use, so that importing stays light: names of a package, and optional packages."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from assay.runtime.errors import NotInstalled


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
