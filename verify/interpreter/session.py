"""`faithful`: inside it, launching a Triton kernel interprets it. Triton is imported only then."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def faithful() -> Iterator[None]:
    """Inside it, every Triton kernel that is launched runs in the interpreter, with the right numbers.

    No environment variable is needed, and no GPU; an autotuned kernel runs in one of its configurations, chosen by its
    key. May be nested. Raises ImportError where Triton is not installed.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from assay.verify.interpreter.launch import launch, pick_config
    from assay.verify.interpreter.patches import replaced

    def run(self, *args, grid, warmup=False, **kwargs):
        if not warmup:
            launch(self.fn, args, kwargs, grid, self.pre_run_hooks)

    def run_tuned(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = pick_config(self, kwargs)
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        self.fn.run(*args, **kwargs, **config.all_kwargs())
        self.nargs = None

    with replaced([(JITFunction, "run", run), (InterpretedFunction, "run", run), (Autotuner, "run", run_tuned)]):
        yield


@contextlib.contextmanager
def faithful_where_used() -> Iterator[None]:
    """`faithful` if Triton has been imported: a kernel that was built with it has imported it."""
    if "triton.runtime" in sys.modules:
        with faithful():
            yield
    else:
        yield
