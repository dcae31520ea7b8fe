"""Watching a solution from within its process: what its lines ask of Python, and what they leave changed.

A part of the text that `host` is; see there.
"""

import contextlib
import os
import random
import sys
import time
from typing import Any

import numpy as np
import torch

_frame = sys._getframe
_MOST_EVENTS = 40
_SPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn.functional, torch.testing, torch.cuda, np, np.testing, time, random,
)  # fmt: skip
_LIBRARY = os.path.dirname(torch.__file__)
_STANDARD = os.path.dirname(os.__file__)
_EVENTS = frozenset((
    "open", "import", "sys._getframe", "sys._current_frames", "sys.settrace", "sys.setprofile",
    "gc.get_objects", "gc.get_referrers", "gc.get_referents", "os.listdir", "os.scandir", "glob.glob",
    "subprocess.Popen", "os.system", "os.fork", "os.posix_spawn", "socket.connect",
))  # fmt: skip


class _Watched:
    """What the solution's own lines ask of the system, and of Python's inside."""

    def __init__(self) -> None:
        self.folder, self.active, self.found = "?", False, list[list[str]]()

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active or event not in _EVENTS:
            return
        self.active = False  # what follows raises events too
        try:
            line = self._line()
            if event == "sys._getframe" and not self._looks():
                return
            if line and len(self.found) < _MOST_EVENTS:
                found = [event, str(arguments[0])[:200] if arguments else "", line]
                if found not in self.found:
                    self.found.append(found)
        finally:
            self.active = True

    def _looks(self) -> bool:
        """Whether it is the solution that asks for frames, itself or by `inspect` or `traceback`; others ask too."""
        name = _frame(2).f_code.co_filename
        return name.startswith(self.folder) or os.path.basename(name) in ("inspect.py", "traceback.py")

    def _line(self) -> str:
        """The line of the solution that asked, by way of Python's own library at most."""
        frame: Any = _frame(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.folder):
                return f"{name[len(self.folder) + 1 :]}:{frame.f_lineno}"
            own = name.startswith("<frozen") or (name.startswith(_STANDARD) and "site-packages" not in name)
            if not own:
                return ""
            frame = frame.f_back
        return ""


watched = _Watched()
sys.addaudithook(watched.hook)


def settings() -> dict[str, str]:
    """What changes the numbers of others, as it is now."""
    cuda, cpu = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    convolution = getattr(torch.backends.cudnn, "conv", None)
    named = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": torch.get_default_device(),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
        "torch.is_autocast_enabled('cuda')": torch.is_autocast_enabled("cuda"),
        "torch.get_autocast_dtype('cpu')": torch.get_autocast_dtype("cpu"),
        "torch.set_flush_denormal": 5e-324 * 1.0 == 0.0,
        "torch.backends.cudnn.conv.fp32_precision": getattr(convolution, "fp32_precision", ""),
        "torch.backends.mkldnn.matmul.fp32_precision": getattr(cpu, "fp32_precision", ""),
        "torch.backends.cuda.matmul.fp32_precision": getattr(cuda, "fp32_precision", ""),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "numpy.geterr()": sorted(np.geterr().items()),
    }
    for name in (
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ):
        named[f"torch.backends.cuda.matmul.{name}"] = getattr(cuda, name, None)
    return {name: "ieee" if str(value) == "none" else str(value) for name, value in named.items()}


def put_back(before: dict[str, str]) -> None:
    """The settings that a solution's import or call may not leave changed for what is called next."""
    torch.set_default_dtype(getattr(torch, before["torch.get_default_dtype()"].removeprefix("torch.")))
    torch.set_num_threads(int(before["torch.get_num_threads()"]))


def _public(name: str) -> bool:
    return name[0] != "_" or name[:2] == "__"


def namespaces() -> list[dict[str, Any]]:
    """What the watched libraries hold now."""
    return [dict(vars(space)) for space in _SPACES]


def replaced(before: list[dict[str, Any]]) -> list[str]:
    """The public functions of torch, numpy and time that are others now; they are put back."""
    found = []
    for space, old in zip(_SPACES, before, strict=True):
        now = dict(vars(space))
        for name, value in old.items():
            other = now.get(name)
            if other is value or not _public(name) or not (callable(value) or callable(other)):
                continue
            code = getattr(other, "__code__", None)
            if code is not None and code.co_filename.startswith(_LIBRARY):
                continue  # torch wraps some of its own when its compiler is loaded
            found.append(f"{space.__name__}.{name}")
            with contextlib.suppress(Exception):
                setattr(space, name, value)
        if isinstance(space, type):
            for name in now.keys() - old.keys():
                if _public(name) and any(name in vars(base) for base in space.__mro__[1:]):
                    found.append(f"{space.__name__}.{name}")
                    with contextlib.suppress(Exception):
                        delattr(space, name)
    return found
