"""One call of a kernel in a plain process, in which the kernel can't detect an examination.

No module of this project is imported there, inputs are ordinary tensors without guarded memory, and the environment
variables that identify test runners are unset. This exposes a kernel that computes correctly only while it is watched.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch

from assay.runtime.process import Process
from assay.runtime.sandbox import clean_environment

START = 120.0
"""Seconds to import torch and the kernel's module."""

_BODY = """
import importlib, pickle, sys
import torch
with open(sys.argv[1], "rb") as file:
    path, target, arguments, keywords = pickle.load(file)
sys.path[:] = path
module, _, name = target.partition(":")
kernel = importlib.import_module(module)
for part in name.split("."):
    kernel = getattr(kernel, part)
result = kernel(*arguments, **keywords)
result = list(result) if isinstance(result, (tuple, list)) else [result]
torch.save([value.detach().as_subclass(torch.Tensor).cpu().contiguous().clone() for value in result], sys.argv[2])
"""


def is_there(target: str) -> bool:
    """Whether a plain process that searches ``sys.path`` finds the file that defines ``module:function``."""
    module = target.partition(":")[0]
    path, result = None, None
    for length in range(1, module.count(".") + 2):
        result = PathFinder.find_spec(".".join(module.split(".")[:length]), path)
        if result is None:
            return False
        path = result.submodule_search_locations
    here = getattr(sys.modules.get(module), "__file__", None)
    return result is not None and result.origin is not None and result.origin == here


@dataclass(frozen=True)
class NoResult:
    """The reason why a call failed; ``lacks_gpu`` if Triton found no GPU, so that the kernel runs only interpreted."""

    message: str

    @property
    def lacks_gpu(self) -> bool:
        return "0 active drivers" in self.message  # Triton's words


def call_outside(
    target: str, arguments: list[torch.Tensor], keywords: Mapping[str, Any], timeout: float
) -> list[torch.Tensor] | NoResult:
    """Return the results of ``module:function`` in a plain process, or why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given", Path(folder) / "found"
        with given.open("wb") as file:
            pickle.dump((sys.path, target, [_alone(tensor) for tensor in arguments], _all_alone(keywords)), file)
        process = Process.start_plain(_BODY, (str(given), str(result)), clean_environment())
        in_time = process.ends_within(timeout + START)
        code = process.kill()
        if not in_time:
            return NoResult("no result in time")
        if code or not result.exists():
            return NoResult(process.last_words() or f"exit status {code}")
        results: list[torch.Tensor] = torch.load(result, weights_only=True)  # no object of the kernel's making
        return results


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the tensor, without guarded memory around it."""
    return tensor.detach().contiguous().clone()


def _all_alone(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _alone(value) if isinstance(value, torch.Tensor) else value for name, value in keywords.items()}
