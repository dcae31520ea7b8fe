"""Watching a solution from within its process: what it leaves changed, of settings and of libraries.

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

_SPACES: tuple[Any, ...] = (
    torch, torch.Tensor, torch.nn.functional, torch.testing, torch.cuda, np, np.testing, time, random,
)  # fmt: skip
_LIBRARY = os.path.dirname(torch.__file__)
own_classes: list[type] = []


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
    """What the watched libraries hold now, and this text itself."""
    return [dict(vars(space)) for space in _spaces()]


def _spaces() -> tuple[Any, ...]:
    return (*_SPACES, sys.modules["__main__"], *own_classes)


def replaced(before: list[dict[str, Any]]) -> list[str]:
    """The public functions of torch, numpy and time, and any of this text, that are others now; they are put back."""
    results = []
    for space, old in zip(_spaces(), before, strict=True):
        now = dict(vars(space))
        for name, value in old.items():
            other, own = now.get(name), "__main__" in (space.__name__, getattr(space, "__module__", ""))
            if other is value or not (own or _public(name)) or not (callable(value) or callable(other)):
                continue
            code = getattr(other, "__code__", None)
            if code is not None and code.co_filename.startswith(_LIBRARY):
                continue  # torch wraps some of its own when its compiler is loaded
            results.append(f"{'__main__.' * (own and isinstance(space, type))}{space.__name__}.{name}")
            with contextlib.suppress(Exception):
                setattr(space, name, value)
        if isinstance(space, type):
            for name in now.keys() - old.keys():
                if _public(name) and any(name in vars(base) for base in space.__mro__[1:]):
                    results.append(f"{space.__name__}.{name}")
                    with contextlib.suppress(Exception):
                        delattr(space, name)
    return results
