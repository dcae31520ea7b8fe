"""Wrapping functions of modules that may be imported already, later, or never; nothing here imports any of them.

A function imported by name (``from torch.testing import assert_close``) before it was wrapped is found by identity in
the modules that hold it, and so it is when the wrapping ends.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from assay.mutation.comparisons import Comparison, Wrapper


class Patches:
    """What is wrapped at the moment; `start` and `stop` are called once each."""

    def __init__(self, comparisons: Iterable[Comparison], wrapper: Wrapper) -> None:
        self._waiting: dict[str, list[Comparison]] = {}
        for comparison in comparisons:
            self._waiting.setdefault(comparison.module, []).append(comparison)
        self._wrapper = wrapper
        self._finder = _Finder(self)
        self._methods: list[tuple[type, str, Any]] = []
        self._absent: list[Comparison] = []
        self._functions: dict[int, tuple[Any, Any]] = {}  # by id of the wrapper: the wrapper and its original

    def start(self) -> None:
        """Wrap what is imported, and from now on what will be."""
        for module in [name for name in self._waiting if name in sys.modules]:
            self.imported(module)
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Put everything back."""
        sys.meta_path.remove(self._finder)
        for owner, name, before in reversed(self._methods):
            if before is None:  # it had been inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        _rebind(self._functions)

    @property
    def missing(self) -> list[Comparison]:
        """What has never been found."""
        return [comparison for waiting in self._waiting.values() for comparison in waiting] + self._absent

    def waits_for(self, module: str) -> bool:
        """Whether something of ``module`` is still to be wrapped."""
        return module in self._waiting

    def imported(self, name: str) -> None:
        """Wrap what has been waiting for this module; what this version of it lacks is passed over."""
        module = sys.modules[name]
        replaced: dict[int, tuple[Any, Any]] = {}
        for comparison in self._waiting.pop(name, []):
            owner_name, _, attribute = comparison.name.rpartition(".")
            owner: Any = getattr(module, owner_name, None) if owner_name else module
            original = getattr(owner, attribute, None)
            if original is None:
                self._absent.append(comparison)
                continue
            wrapped = self._wrapper(original, comparison)
            if isinstance(owner, type):
                self._methods.append((owner, attribute, vars(owner).get(attribute)))
                setattr(owner, attribute, wrapped)
            else:
                replaced[id(original)] = (original, wrapped)
                self._functions[id(wrapped)] = (wrapped, original)
        if replaced:
            _rebind(replaced)


def _rebind(replaced: dict[int, tuple[Any, Any]]) -> None:
    """In every module, each global that is the first of a pair becomes the second."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or names is None:  # lazy modules of all kinds
            continue
        for name, value in list(names.items()):
            pair = replaced.get(id(value))
            if pair is not None and pair[0] is value:
                names[name] = pair[1]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; has a module that is waited for wrapped as soon as it has been executed."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or not self._patches.waits_for(fullname):
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patches)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then the wrapping."""

    def __init__(self, loader: Any, patches: Patches) -> None:
        self._loader = loader
        self._patches = patches

    def __getattr__(self, name: str) -> Any:  # get_source, get_resource_reader and the like
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patches.imported(module.__name__)
