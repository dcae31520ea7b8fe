"""What the workers of `test_isolate` do."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from assay.golden.errors import InputError


def behave(word: str, remember: Callable[[str], None]) -> str:
    """Do what the word says, and come back with it if that can be."""
    remember(f"about to {word}")
    match word:
        case "abort":
            os.write(2, b"first line\nlast words\n")
            os.kill(os.getpid(), signal.SIGABRT)
        case "exit":
            os._exit(3)
        case "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
            time.sleep(600)
        case "complain":
            raise InputError("mend this")
        case "stumble":
            raise ZeroDivisionError("oops")
    return word
