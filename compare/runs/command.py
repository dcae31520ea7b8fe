"""The process of `assay compare record`: runs a script of the user's and records the first model that takes token ids.

Called as ``python -m assay.compare.runs.command OUT SCRIPT ARGUMENTS``, or with ``-m MODULE`` for the script.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from assay.compare.errors import RecordingError
from assay.compare.runs.recording import record
from assay.runtime.errors import AssayError


def main(arguments: Sequence[str]) -> int:
    """Run a script under `record`, and return its exit status; 2 where nothing was recorded."""
    out, *command = arguments
    with contextlib.ExitStack() as stack:
        recording: list[record] = []
        call = nn.Module.__call__

        def first_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not recording and _takes_tokens([*args, *kwargs.values()]):
                recording.append(record(out, module))
                stack.enter_context(recording[0])
            return call(module, *args, **kwargs)

        stack.enter_context(patch.object(nn.Module, "__call__", first_call))
        try:
            status = _run(command)
        finally:
            if not recording:
                raise RecordingError(
                    f"{' '.join(command)}: no module was called with token ids (integers [batch, tokens]); "
                    "use assay.compare.record(OUT, model) in the script"
                )
    return status


def _takes_tokens(values: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32) for x in values)


def _run(command: Sequence[str]) -> int:
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except AssayError as error:
        print(f"assay: {error}", file=sys.stderr)
        sys.exit(2)
