"""Names of modules as the targets that serving stacks match: exact, or a regular expression over their numbers."""

import math
import re
from collections.abc import Collection, Iterable

from assay.configs import architectures


def targets_of(names: Iterable[str]) -> list[str]:
    r"""Targets that match exactly these names: the names themselves, which vLLM maps where it calls modules otherwise
    than a checkpoint does, and patterns not.

    Experts, of which there may be thousands, share a pattern where they differ in their numbers only. "re:" targets are
    read with `re.match`, which anchors the start alone: each ends with "$".
    """
    given = dict.fromkeys(names)
    exact = [name for name in given if not architectures.in_experts(name)]
    targets = exact + _alike(name for name in given if architectures.in_experts(name))
    return sorted(targets, key=lambda target: target.startswith("re:"))


def also_asked_for(names: Collection[str]) -> list[str]:
    """Targets for names that engines ask for instead of these (`architectures.asked_for`): patterns of products, and of
    experts, whose own targets are patterns, names, which engines map."""
    asked = architectures.asked_for(dict.fromkeys(names))
    experts = [name for name in asked if architectures.in_experts(name)]
    return [*experts, *_alike(name for name in asked if not architectures.in_experts(name))]


def matches(target: str, name: str, classes: Collection[str] = ()) -> bool:
    """Whether a compressed-tensors target means the module: its exact name, "re:" pattern, or one of its classes."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name or target in classes


def _alike(names: Iterable[str]) -> list[str]:
    """Targets of names, one for all that differ in their numbers only where every number goes with every other."""
    alike: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        words = tuple("#" if word.isdecimal() else word for word in name.split("."))
        alike.setdefault(words, set()).add(tuple(int(word) for word in name.split(".") if word.isdecimal()))
    return [target for words, numbers in alike.items() for target in _targets(words, numbers)]


def _targets(words: tuple[str, ...], numbers: set[tuple[int, ...]]) -> list[str]:
    """Targets of names that are ``words`` with ``numbers`` in the places of "#"."""
    indices = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if len(numbers) == 1:
        given = (str(position[0]) for position in indices)
        return [".".join(next(given) if word == "#" else word for word in words)]
    if math.prod(map(len, indices)) == len(numbers):
        choices = (
            str(position[0]) if len(position) == 1 else f"({'|'.join(map(str, position))})" for position in indices
        )
        return ["re:" + r"\.".join(next(choices) if word == "#" else re.escape(word) for word in words) + "$"]
    # Not every number goes with every other: those of the first place that has several stand apart.
    position = next(index for index, values in enumerate(indices) if len(values) > 1)
    return [
        target
        for value in indices[position]
        for target in _targets(words, {some for some in numbers if some[position] == value})
    ]
