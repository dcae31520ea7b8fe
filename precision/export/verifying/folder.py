"""A whole folder of an export: each of its files by its reader, then by its bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from assay.precision.export.configurations.gguf import IMATRIX, TYPES
from assay.precision.export.manifest import digest_of
from assay.precision.export.verifying import checkpoints, gguf, mlx
from assay.precision.export.verifying.torchao import torchao
from assay.precision.export.verifying.verified import Asked, Verified
from assay.precision.loading.quiet import one_line, quiet
from assay.runtime.errors import NotInstalled

_READERS: dict[str, Callable[[Asked, str], Verified]] = {
    "quantization_config.json": checkpoints.configuration,
    "checkpoint/config.json": checkpoints.checkpoint,
    "torchao.json": torchao,
    TYPES: gguf.types,
    IMATRIX: gguf.importance,
    "mlx_convert.py": mlx.program,
}
"""Files of an export that something here reads."""
_UNREAD = ("vllm.json",)
_MADE: dict[str, tuple[str, Callable[[Asked, Path], Verified]]] = {
    gguf.MODEL: ("gguf", gguf.model),
    mlx.FOLDER: ("mlx", mlx.converted),
}
"""What the commands of an export make, with its format."""


def verify_export(folder: str | Path) -> list[Verified]:
    """Read the files of an export (a folder with export.json) by the code of those that load them.

    compressed-tensors' own classes parse its configuration and match each linear, and the fused ones of vLLM; of a
    checkpoint its tensors are looked for too. torchao parses its file, MLX quantises linears of the same names as the
    program says, and the patterns for llama-quantize are matched by its rules. model.gguf and mlx_model, where
    llama-quantize and mlx_lm have made them in the same folder, are read by gguf and MLX. A file whose bytes aren't
    those that were written is told in any case. Raises CannotExport for another folder.
    """
    asked = Asked.of(folder)
    results = {file: _answer(file, partial(_READERS[file], asked, file)) for file in asked.files if file in _READERS}
    results |= {file: Verified(file, "") for file in asked.files if file in _UNREAD}
    for file, digest in asked.digests.items():
        if file in results and results[file].wrong:
            continue
        now = digest_of(asked.place / file) if (asked.place / file).is_file() else None
        if now != digest:
            was = "it is missing" if now is None else "its bytes aren't those that were written"
            results[file] = Verified(file, "SHA-256", 0, (f"{was}: export anew",))
    for name, (format, read) in _MADE.items():
        if format in asked.held and (asked.place / name).exists():
            results[name] = _answer(name, partial(read, asked, asked.place / name))
    return list(results.values())


def _answer(file: str, read: Callable[[], Verified]) -> Verified:
    """What a reader says; whatever it raises is its refusal."""
    try:
        with quiet():
            return read()
    except NotInstalled:
        return Verified(file, "")
    except Exception as error:
        return Verified(file, "its reader refuses it", 0, (one_line(error),))
