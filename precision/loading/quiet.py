"""Silence while other packages load: their important warnings become one-line errors."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, log records below CRITICAL and, once transformers is loaded, its progress bars."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    bars = getattr(sys.modules.get("transformers.utils.logging"), "is_progress_bar_enabled", lambda: False)()
    if bars:
        sys.modules["transformers.utils.logging"].disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        if bars:
            sys.modules["transformers.utils.logging"].enable_progress_bar()


def one_line(error: BaseException) -> str:
    """Return the type and message of an error, in one line of at most 200 characters."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 200 else f"{said[:197]}..."
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
