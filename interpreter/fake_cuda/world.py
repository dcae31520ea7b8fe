"""`pretend_cuda`: torch and Triton with an emulated CUDA device on the CPU. Imports torch only when it is entered."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from assay.formats.devices import CudaProperties


class _World:
    """The emulated devices of the nested contexts, the innermost last, and what they have changed."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.devices: list[CudaProperties] = []
        self.applied = contextlib.ExitStack()
        self._changes: list[Any] | None = None

    def device(self) -> CudaProperties:
        from assay.formats.devices import DEFAULT_CUDA_DEVICE, cuda_device_named

        return self.devices[-1] if self.devices else cuda_device_named(DEFAULT_CUDA_DEVICE)

    def begin(self) -> None:
        from assay.interpreter.replacing import replaced

        if self._changes is None:
            self._changes = self._find_changes()
        self.applied.enter_context(_keep_default_device())
        self.applied.enter_context(_eager())
        self.applied.enter_context(replaced(self._changes))
        self.applied.enter_context(_nvidia_smi(self.device().name))

    def end(self) -> None:
        self.applied.close()

    def _find_changes(self) -> list[Any]:
        from assay.interpreter.fake_cuda import random, tensors, torch_cuda

        result = [*tensors.changes(), *torch_cuda.changes(self.device), *random.changes(self.device)]
        if importlib.util.find_spec("triton") is not None:
            from assay.interpreter.fake_cuda import driver

            result += driver.changes(self.device)
        return result


_world = _World()


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Run compiled functions eagerly, and load torch's compiler with the originals restored.

    The compiler takes seconds to load, and at import it keeps tables of torch's functions as they are.
    """
    if "torch._dynamo.trace_rules" in sys.modules:
        from assay.interpreter.fake_cuda.torch_cuda import eager

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
    """Loads torch's compiler with the world suspended."""

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
def _keep_default_device() -> Iterator[None]:
    """Restore torch's default device if it was set to CUDA inside."""
    import torch

    before = _default_device()
    try:
        yield
    finally:
        now = _default_device()
        if now is not None and now.type == "cuda" and now != before:
            torch.set_default_device(before)


def _default_device() -> Any:
    """Return the argument of the last `torch.set_default_device`, or None."""
    import torch

    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


@contextlib.contextmanager
def _nvidia_smi(name: str) -> Iterator[None]:
    """Put a command ``nvidia-smi`` on PATH unless there is one: some libraries look for a GPU by it."""
    if os.name != "posix" or shutil.which("nvidia-smi"):
        yield
        return
    from assay.runtime.files import OwnFolder

    before = os.environ.get("PATH")
    with OwnFolder("assay-device-") as folder:
        tool = folder / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho 'GPU 0: {name} (emulated)'\n", encoding="utf-8")
        tool.chmod(0o755)
        os.environ["PATH"] = os.pathsep.join(filter(None, (before, str(folder))))
        try:
            yield
        finally:
            if before is None:
                del os.environ["PATH"]
            else:
                os.environ["PATH"] = before


@contextlib.contextmanager
def pretend_cuda(device: str | CudaProperties = "cuda") -> Iterator[None]:
    """Emulate a CUDA device for torch and Triton inside; its tensors are the CPU's.

    ``device`` is a CUDA device of ``configs/devices.toml``, in any case, or its properties; "cuda" is "h200". Tensors
    created on "cuda", and results of operators, claim to be on the device; copies between devices are real copies.
    `torch.cuda` and `torch.accelerator` have the device's properties; streams and events record time; memory figures
    count tensors created on the device by name; CUDA graphs raise. `torch.rand`, `randn`, `randint` and `bernoulli_`
    draw the device's own numbers for a seed (`assay.interpreter.fake_cuda.random`). Autocast, generators, pinned memory
    and `triton.runtime.driver.active` follow; compiled functions run eagerly; operators registered for CUDA are
    registered for the CPU too, permanently. Holds in all threads, may be nested, and ends with everything restored.
    Kernels of Triton also need `faithful`. Raises `SettingError` for an unknown device.
    """
    from assay.formats.devices import DEFAULT_CUDA_DEVICE, cuda_device_named

    if isinstance(device, str):
        device = cuda_device_named(DEFAULT_CUDA_DEVICE if device == "cuda" else device)
    emulated = device
    with _world.lock:
        _world.devices.append(emulated)
        if len(_world.devices) == 1:
            _world.begin()
    try:
        yield
    finally:
        with _world.lock:
            _world.devices.remove(emulated)
            if not _world.devices:
                _world.end()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Restore torch and Triton inside as they are outside of all `pretend_cuda`."""
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
    """Return the device that is emulated now, as `pretend_cuda` takes it, or ""."""
    return _world.devices[-1].key if _world.devices else ""


def put_on_device(tensors: Iterable[Any]) -> None:
    """Let tensors of the CPU claim to be on the device."""
    from assay.interpreter.fake_cuda.tensors import put

    for tensor in tensors:
        put(tensor, "device")
