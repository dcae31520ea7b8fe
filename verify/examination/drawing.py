"""Hypothesis without constants from the sources of the program that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def without_local_constants() -> Iterator[None]:
    """Let Hypothesis draw no constants that it finds in the sources of the user's modules.

    Since version 6.131 it parses every module of the current folder, which takes up to seconds, stores what it finds in
    the folder ``.hypothesis`` there, and draws it now and then: the same seed then gives other cases elsewhere. No
    setting turns this off. Hypothesis keeps what it may draw by the bounds of a number, so that it forgets that at both
    ends: tests of the user's own with Hypothesis draw as before.
    """
    try:
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants
    except ImportError:  # an earlier version
        yield
        return
    modules: Any = providers
    with patch.object(modules, "_get_local_constants", Constants):
        modules.CONSTANTS_CACHE.cache.clear()
        try:
            yield
        finally:
            modules.CONSTANTS_CACHE.cache.clear()
