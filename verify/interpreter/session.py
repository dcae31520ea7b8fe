"""`faithful`: inside it, launching a Triton kernel interprets it. Triton is imported only then."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""The versions of Triton in which every self-test has been seen to hold."""


class UnknownTriton(UserWarning):
    """This version of Triton has not been tried; the message says which self-tests hold in it and which don't."""


@contextlib.contextmanager
def faithful() -> Iterator[None]:
    """Inside it, every Triton kernel that is launched runs in the interpreter, with the right numbers.

    No environment variable is needed, and no GPU; an autotuned kernel runs in one of its configurations, chosen by its
    key. May be nested. Warns of `UnknownTriton` in a version other than `KNOWN_VERSIONS`. Raises ImportError where
    Triton is not installed.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from assay.verify.interpreter.launch import launch, pick_config
    from assay.verify.interpreter.patches import interpreted

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            launch(self, args, kwargs, grid)

    def run_tuned(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            self.best_config = config = pick_config(self, kwargs)
            if config.pre_hook is not None:
                config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        finally:
            self.nargs = None

    with interpreted([(JITFunction, "run", run), (InterpretedFunction, "run", run), (Autotuner, "run", run_tuned)]):
        _vouch()
        yield


def triton_is_loaded() -> bool:
    """Whether anything has imported Triton, as a kernel that is built with it has."""
    return "triton.runtime" in sys.modules


@cache
def _vouch() -> None:
    """Warn, once, where nobody has tried this version of Triton."""
    import triton

    if not triton.__version__.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS)):
        from assay.verify.interpreter.checks import self_test

        results = self_test()
        failed = [f"{claim} ({reason})" for claim, reason in results.items() if reason]
        warnings.warn(
            f"Triton {triton.__version__} is unknown here (known: {', '.join(KNOWN_VERSIONS)}); of the interpreter's "
            f"{len(results)} self-tests {len(results) - len(failed)} hold, and nothing is vouched for beyond them"
            + (f"; wrong: {'; '.join(failed)}" if failed else ""),
            UnknownTriton,
            stacklevel=4,
        )
