"""Outside: one call of a kernel in a plain process, where nothing tells that it is being examined.

No module of this project is imported there, inputs are ordinary tensors without guarded memory around them, and the
variables by which test runners are known are unset. A kernel that computes the right thing only when it sees that it
is watched is judged by what it gives here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_TELLTALE = ("PYTEST", "ASSAY", "HYPOTHESIS", "COV_")
_START = 120.0  # seconds to import torch and the kernel's module
_ABSENT = 3  # exit status: the kernel can't be imported outside

_BODY = f"""
import importlib, pickle, sys
with open(sys.argv[1], "rb") as file:
    path, target, arguments, keywords = pickle.load(file)
sys.path[:] = path
module, _, name = target.partition(":")
try:
    kernel = importlib.import_module(module)
    for part in name.split("."):
        kernel = getattr(kernel, part)
except (ImportError, AttributeError):
    sys.exit({_ABSENT})
result = kernel(*arguments, **keywords)
result = list(result) if isinstance(result, (tuple, list)) else [result]
with open(sys.argv[2], "wb") as file:
    pickle.dump([value.detach().cpu().contiguous().clone() for value in result], file)
"""


def call_outside(
    target: str, arguments: list[torch.Tensor], keywords: Mapping[str, Any], timeout: float
) -> list[torch.Tensor] | str | None:
    """The results of ``module:function`` in a plain process; a string says how it failed, None that it isn't there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_TELLTALE)}
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given", Path(folder) / "found"
        with given.open("wb") as file:
            pickle.dump((sys.path, target, [_plain(tensor) for tensor in arguments], _plain_ones(keywords)), file)
        try:
            done = subprocess.run(
                [sys.executable, "-c", _BODY, str(given), str(found)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout + _START,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "no result in time"
        if done.returncode == _ABSENT:
            return None
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        with found.open("rb") as file:
            results: list[torch.Tensor] = pickle.load(file)
            return results


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().clone()


def _plain_ones(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, torch.Tensor) else value for name, value in keywords.items()}
