"""What serves a model makes of its sites: which take one scheme together, and which may have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _all(site: Any, scheme: str, head: bool) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served; by default as most engines do it, with any scheme anywhere."""

    apart: bool = False
    """No linears run as one product."""
    one_cache: bool = False
    """The KV caches of all layers take one scheme."""
    tied: bool = True
    """A table that is the head's weight too may have a scheme."""
    allows: Callable[[Any, str, bool], bool] = _all
    """Whether a scheme made for its kind of place may stand at a `Site`; the last says whether it gives the logits."""


USUAL = Served()
"""Where no engine is named."""
