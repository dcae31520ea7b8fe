"""`pretend_cuda`: "cuda" answers, and is the CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from assay.interpreter.cuda_devices import USUAL, CudaDevice, cuda_device_named


class _World:
    """Whether "cuda" is pretended now, by whom, and as which device: the last one named."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.devices: list[CudaDevice] = []
        self.applied = contextlib.ExitStack()
        self._changes: list[Any] | None = None

    def device(self) -> CudaDevice:
        """The device that answers."""
        return self.devices[-1] if self.devices else cuda_device_named(USUAL)

    def begin(self) -> None:
        """Replace what must be."""
        from assay.interpreter.replacing import replaced

        if self._changes is None:
            self._changes = self._found()
        self.applied.enter_context(_own_default_device())
        self.applied.enter_context(_eager())
        self.applied.enter_context(replaced(self._changes))
        self.applied.enter_context(_system_tool(self.device().name))

    def end(self) -> None:
        """Put all back."""
        self.applied.close()

    def _found(self) -> list[Any]:
        from assay.interpreter import pretended_cuda, pretended_parts, pretended_tensors

        found = [*pretended_tensors.changes(), *pretended_cuda.changes(self.device), *pretended_parts.changes()]
        if importlib.util.find_spec("triton") is not None:
            from assay.interpreter import pretended_driver

            found += pretended_driver.changes(self.device)
        return found


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Inside it, what torch's compiler made runs as it was written, and whoever loads the compiler (it takes seconds)
    does so with everything put back: it keeps tables of torch's functions as they are then."""
    if "torch._dynamo.trace_rules" in sys.modules:
        from assay.interpreter.pretended_parts import eager

        with eager():
            yield
        return
    finder = _CompilerFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _CompilerFinder(importlib.abc.MetaPathFinder):
    """Finds torch's compiler, and loads it in the world as it is outside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch._dynamo":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _world.lock, suspended():
                    load(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


@contextlib.contextmanager
def _own_default_device() -> Iterator[None]:
    """After it, torch's default device isn't CUDA, unless it was before."""
    import torch

    before = _default_device()
    try:
        yield
    finally:
        now = _default_device()
        if now is not None and now.type == "cuda" and now != before:
            torch.set_default_device(before)


def _default_device() -> Any:
    """What `torch.set_default_device` was given, or None."""
    import torch

    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


@contextlib.contextmanager
def _system_tool(name: str) -> Iterator[None]:
    """Inside it, a command ``nvidia-smi`` is found, by which some libraries look for a GPU; a real one goes first."""
    if os.name != "posix" or shutil.which("nvidia-smi"):
        yield
        return
    before = os.environ.get("PATH")
    with tempfile.TemporaryDirectory(prefix="assay-", ignore_cleanup_errors=True) as folder:
        tool = Path(folder, "nvidia-smi")
        tool.write_text(f"#!/bin/sh\necho 'GPU 0: {name} (pretended)'\n", encoding="utf-8")
        tool.chmod(0o755)
        os.environ["PATH"] = os.pathsep.join(filter(None, (before, folder)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PATH"]
            else:
                os.environ["PATH"] = before


_world = _World()


@contextlib.contextmanager
def pretend_cuda(device: str = "cuda") -> Iterator[None]:
    """Inside it, torch and Triton answer as where there is a GPU, and its tensors are the CPU's.

    ``device`` names it: a row of ``configs/cuda_devices.toml``, in any case; "cuda" is "h200". Tensors that are asked
    for on "cuda" say that they lie there, and so does what torch computes. To another place tensors are copied, as to
    a GPU. `torch.cuda` and `torch.accelerator` tell the device's properties, streams and events do nothing and keep
    time, memory figures count the tensors asked for by name, CUDA graphs are refused. Autocast, generators, pinned
    memory and `triton.runtime.driver.active` go along; what `torch.compile` made runs uncompiled; what an operator is
    registered to do on CUDA it does on the CPU too, for good. Holds in all threads; may be nested, and everything is as
    it was afterwards. Kernels of Triton run only where there is `faithful` as well. Raises `SettingError` for an
    unknown device.
    """
    chosen = cuda_device_named(USUAL if device == "cuda" else device)
    with _world.lock:
        _world.devices.append(chosen)
        if len(_world.devices) == 1:
            _world.begin()
    try:
        yield
    finally:
        with _world.lock:
            _world.devices.remove(chosen)
            if not _world.devices:
                _world.end()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside it, the world is as it is outside of all `pretend_cuda`."""
    with _world.lock:
        devices, _world.devices = _world.devices, []
        default = _default_device() if devices else None
        if devices:
            _world.end()
    try:
        yield
    finally:
        with _world.lock:
            _world.devices = devices
            if devices:
                _world.begin()
            if default is not None:
                importlib.import_module("torch").set_default_device(default)


def pretended() -> str:
    """The device that is pretended here and now, as `pretend_cuda` takes it; empty where none is."""
    return _world.devices[-1].key if _world.devices else ""


def put_on_device(tensors: Iterable[Any]) -> None:
    """Let tensors of the CPU count as lying on the device."""
    from assay.interpreter.places import put

    for tensor in tensors:
        put(tensor, "device")
