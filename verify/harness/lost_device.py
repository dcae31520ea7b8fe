"""A lost device: which errors leave a process without its GPU, and what is then said of the kernel.

The errors are the table configs/device_errors.toml, with its sources. On such a device the kernel runs in a process
that the examination can lose (`isolation`), if another process can import it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from assay.configs import table
from assay.runtime.errors import first_line
from assay.verify.cases.case import Case
from assay.verify.errors import DeviceLost
from assay.verify.findings import Failure

LOST = "the device's context is lost: run again with --isolate or give the kernel as module:function"


def can_be_lost(device: torch.device | str) -> bool:
    """Return whether a fault of a kernel on this device takes the device from the whole process."""
    return torch.device(device).type == "cuda"


def is_lost(error: BaseException) -> bool:
    """Return whether an error, or one that it comes from, means that this process can't use its device any more."""
    return any(says_lost(str(each), isinstance(each, torch.AcceleratorError)) for each in _chain(error))


def says_lost(message: str, is_of_device: bool = False) -> bool:
    """Return whether a message is of an error that loses the device; ``is_of_device``: even if nothing names one."""
    rows = _table()
    if any(_names(row, message) for row in rows["lost"]):
        return True
    is_of_device |= any(words in message for words in rows["markers"])
    return is_of_device and not any(_names(row, message) for row in rows["kept"])


def _names(row: dict[str, Any], message: str) -> bool:
    """Return whether a message contains an error's words, or one of its names as a whole word."""
    return ("words" in row and row["words"] in message) or any(
        re.search(rf"{name}\b", message) for name in row["names"]
    )


@cache
def _table() -> dict[str, Any]:
    return table("device_errors")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that it was raised from or during."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def by_device(error: BaseException) -> BaseException:
    """Return the error by which the CUDA device says that it is lost, if a kernel's error hides that; else the same."""
    if not is_lost(error) and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except Exception as later:
            return later if is_lost(later) else error
    return error


def failure_by(error: BaseException, case: Case) -> Failure:
    """Return the failure of a case by an error that loses the device."""
    return Failure("crash", case, f"{type(error).__name__}: {first_line(error)}", device_lost=True)


def check_not_lost() -> None:
    """Raise `DeviceLost` if this process has lost its CUDA device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        try:
            torch.cuda.synchronize()
        except Exception as error:
            if is_lost(error):
                raise DeviceLost(f"{LOST} ({first_line(error)})") from None
