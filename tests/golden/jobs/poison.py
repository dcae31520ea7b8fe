"""A spec that goes wrong in every way a task can."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from assay.golden import choice, define, number
from assay.golden.errors import InputError

WAYS = ("none", "raise", "mend", "memory", "exit", "kill", "hang", "raise_once", "kill_once", "log")
FOLDER = "ASSAY_TEST_POISON"  # names the folder where what must be known of other processes is left


def identity(x: Any) -> float:
    """Return a number that identifies a task's inputs: plain sums of thousands of float32 pairs collide."""
    return sum(value * 0.7390851332151607**index for index, value in enumerate(x.double().flatten().tolist()))


@define(
    "poison",
    "x[R,N] -> y[R,N]",
    options={"way": choice(*WAYS), "number": number(0.0)},
    rows="R",
    public=False,  # other tests go through all specs
)
def poison(xp: Any, x: Any, *, way: str, number: float) -> Any:
    folder = Path(os.environ.get(FOLDER, "."))
    once = way.endswith("_once")
    if once and not _first(folder / f"{way}-{number}"):
        return x + x
    match way.removesuffix("_once"):
        case "raise":
            raise ZeroDivisionError("poison")
        case "mend":
            raise InputError("poison: mend this")
        case "memory":
            raise MemoryError
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
            time.sleep(600)
        case "log":
            with open(folder / "log", "a", encoding="ascii") as file:
                file.write(f"{identity(x.mid)!r}\n")
            time.sleep(0.01)
    return x + x


def _first(marker: Path) -> bool:
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
