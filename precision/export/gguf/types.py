"""A file of types for ``llama-quantize --tensor-type-file``, read as llama-quantize reads it."""

from __future__ import annotations

import re


def types_in(text: str) -> list[tuple[str, str]]:
    """Its patterns, in lower case, and their types: words by white space, split at the first equals sign."""
    return [(pattern.lower(), kind) for pattern, _, kind in (word.partition("=") for word in text.split())]


def kinds_of(tensor: str, types: list[tuple[str, str]]) -> set[str]:
    """The types of the patterns that are found in a tensor's name: one, where first and last match are alike."""
    return {kind for pattern, kind in types if re.search(pattern, tensor)}
