"""What llama-quantize is given, read by its rules, and the file that it makes, read by gguf."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np

from assay.configs.architectures import quantised_by_gguf
from assay.precision.export.configurations.gguf import kinds_of, library, types_in
from assay.precision.export.verifying.verified import Asked, Verified, difference
from assay.precision.schemes import scheme_named
from assay.precision.schemes.ggml import BlockType, block_types
from assay.runtime.results import installed_version

MODEL = "model.gguf"
"""What the commands of an export call the file that llama-quantize makes."""
_KEPT: Set[str] = {"bf16", "f16", "f32"}


def types(asked: Asked, file: str) -> Verified:
    """The type that the patterns of a ``--tensor-type-file`` give each tensor, the first and the last found alike.

    Raises ValueError for a pattern or a type that there is not, NotInstalled.
    """
    gguf = library()
    patterns = types_in((asked.place / file).read_text(encoding="utf-8"))
    for pattern, kind in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        if kind.upper() not in gguf.GGMLQuantizationType.__members__:
            raise ValueError(f"expected types of ggml, got {pattern}={kind}")
    wrong = []
    for site, tensor, expected in _tensors(asked):
        result = kinds_of(tensor, patterns)
        alone = not result and not quantised_by_gguf(tensor)  # routers: llama-quantize leaves them as they are
        if not (alone and site not in asked.held["gguf"]) and (len(result) != 1 or not result <= expected):
            wrong.append(_line(asked, site, tensor, sorted(result)))
    rules = f"llama-quantize's rules, types of gguf {installed_version('gguf')}"
    return Verified(file, rules, len(asked.tensors), tuple(wrong))


def importance(asked: Asked, file: str) -> Verified:
    """Whether each tensor that gets a type has finite sums of squares in the importance matrix, and a count.

    Raises NotInstalled, and what gguf raises.
    """
    read = {tensor.name: np.array(tensor.data) for tensor in library().GGUFReader(asked.place / file).tensors}
    weighted = asked.held["gguf"].keys() - set(asked.tables)  # which have no inputs to weight by
    wrong = []
    for site, tensor, _ in _tensors(asked):
        if site not in weighted:
            continue
        sums, counts = read.get(f"{tensor}.in_sum2"), read.get(f"{tensor}.counts")
        if sums is None or counts is None or not (np.isfinite(sums).all() and (sums >= 0).all() and (counts > 0).all()):
            wrong.append(f"{site}: expected sums of squares of its inputs for {tensor}, finite, with a count")
    return Verified(file, f"gguf {installed_version('gguf')}", len(weighted), tuple(wrong))


def model(asked: Asked, path: Path) -> Verified:
    """The type of each tensor in a GGUF file of the model. Raises NotInstalled, and what gguf raises."""
    results = {tensor.name: tensor.tensor_type.name.lower() for tensor in library().GGUFReader(path).tensors}
    wrong = [
        _line(asked, site, tensor, [results[tensor]] if tensor in results else [])
        for site, tensor, expected in _tensors(asked)
        if results.get(tensor) not in expected
    ]
    return Verified(path.name, f"gguf {installed_version('gguf')}", len(asked.tensors), tuple(wrong))


def _tensors(asked: Asked) -> Iterator[tuple[str, str, Set[str]]]:
    """Sites, their tensors, and the types that may be found there: of what isn't held any that isn't of blocks, or what
    llama-quantize takes where rows aren't whole blocks."""
    held = asked.held["gguf"]
    for site, several in asked.tensors.items():
        kind = _blocks(asked.assignment.get(site))
        if kind is not None and site in held:
            expected: Set[str] = {kind.ggml_name}
        else:
            fallback = block_types().get(kind.fallback) if kind is not None else None
            expected = _KEPT if fallback is None else {*_KEPT, fallback.ggml_name}
        for tensor in several:
            yield site, tensor, expected


def _blocks(scheme: str | None) -> BlockType | None:
    weight = None if scheme is None else scheme_named(scheme).weight
    return None if weight is None else weight.blocks


def _line(asked: Asked, site: str, tensor: str, result: list[str]) -> str:
    return difference(f"{site} ({tensor})", asked.held["gguf"].get(site), " and ".join(result) or None)
