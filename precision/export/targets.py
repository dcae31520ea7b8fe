"""Names of modules as the targets that serving stacks match: exact, or a regular expression over layer numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

__all__ = ["matches", "targets_of"]

_LAYER = re.compile(r"\.(\d+)\.")


def targets_of(names: Iterable[str]) -> list[str]:
    r"""Targets that match exactly these names: those that differ in their first layer number only share one target.

    "re:" targets are read with `re.match`, which anchors the start alone: each ends with "$".
    """
    alike: dict[tuple[str, str], list[int]] = {}
    exact = []
    for name in names:
        found = _LAYER.search(name)
        if found is None:
            exact.append(name)
        else:
            alike.setdefault((name[: found.start()], name[found.end() :]), []).append(int(found[1]))
    regular = []
    for (head, tail), layers in alike.items():
        if len(layers) == 1:
            exact.append(f"{head}.{layers[0]}.{tail}")
        else:
            numbers = "|".join(map(str, sorted(layers)))
            regular.append(rf"re:{re.escape(head)}\.({numbers})\.{re.escape(tail)}$")
    return exact + regular


def matches(target: str, name: str, classes: Collection[str] = ()) -> bool:
    """Whether a compressed-tensors target means the module: its exact name, "re:" pattern, or one of its classes."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name or target in classes
