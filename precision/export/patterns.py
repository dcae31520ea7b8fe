"""Module names as targets of serving stacks: exact names, or regular expressions over their numbers."""

import math
import re
from collections.abc import Collection, Iterable

from assay.configs import architectures


def targets_of(names: Iterable[str]) -> list[str]:
    """Return targets that match exactly these names.

    A target is mostly the name itself: vLLM maps names, but not patterns, if it renames modules of the checkpoint.
    Experts, of which there may be thousands, share a pattern if they differ only in their numbers. "re:" targets are
    read with `re.match`, which anchors only the start, so each ends with "$".
    """
    given = dict.fromkeys(names)
    exact = [name for name in given if not architectures.in_experts(name)]
    targets = exact + _alike(name for name in given if architectures.in_experts(name))
    return sorted(targets, key=lambda target: target.startswith("re:"))


def also_asked_for(names: Collection[str]) -> list[str]:
    """Return targets for the names that engines look up instead of these (`architectures.asked_for`).

    Fused linears get patterns. Experts, whose own targets are patterns, get names, which engines map.
    """
    asked = architectures.asked_for(dict.fromkeys(names))
    experts = [name for name in asked if architectures.in_experts(name)]
    return [*experts, *_alike(name for name in asked if not architectures.in_experts(name))]


def matches(target: str, name: str, classes: Collection[str] = ()) -> bool:
    """Return whether a compressed-tensors target matches a module: by exact name, "re:" pattern, or class."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name or target in classes


def _alike(names: Iterable[str]) -> list[str]:
    """Return targets of names; names that differ only in numbers share one if all combinations of the numbers occur."""
    alike: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        words = tuple("#" if word.isdecimal() else word for word in name.split("."))
        alike.setdefault(words, set()).add(tuple(int(word) for word in name.split(".") if word.isdecimal()))
    return [target for words, numbers in alike.items() for target in _targets(words, numbers)]


def _targets(words: tuple[str, ...], numbers: set[tuple[int, ...]]) -> list[str]:
    """Return targets of the names given by ``words`` with ``numbers`` in place of "#"."""
    indices = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    if len(numbers) == 1:
        given = (str(position[0]) for position in indices)
        return [".".join(next(given) if word == "#" else word for word in words)]
    if math.prod(map(len, indices)) == len(numbers):
        choices = (
            str(position[0]) if len(position) == 1 else f"({'|'.join(map(str, position))})" for position in indices
        )
        return ["re:" + r"\.".join(next(choices) if word == "#" else re.escape(word) for word in words) + "$"]
    # Not all combinations of numbers occur: split by the first position with several numbers.
    position = next(index for index, values in enumerate(indices) if len(values) > 1)
    return [
        target
        for value in indices[position]
        for target in _targets(words, {some for some in numbers if some[position] == value})
    ]
