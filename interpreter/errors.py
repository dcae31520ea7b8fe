"""Errors of a launch: findings of the sanitizer, and what the interpreter lacks."""

from __future__ import annotations

from assay.runtime.errors import AssayError


class NotInterpreted(AssayError, NotImplementedError):
    """The interpreter cannot run a kernel that the compiler accepts, or the installed Triton lacks a feature.

    The message names what is missing, in one line.
    """


class DependentPrograms(NotInterpreted):
    """A launch of which some programs were to run can't be judged by those: the line names what they have in common."""


class SanitizerError(AssayError, RuntimeError):
    """A memory access of a kernel that a GPU may fail on, or that may give different results from run to run.

    ``kind`` is that of a failure of `assay.verify.examine`: "out_of_bounds_write", "crash" (a load out of bounds),
    "unwritten_output" (a load of uninitialised memory) or "nondeterministic" (a race between programs). ``tensor`` is
    the kernel's parameter, ``index`` the element counted from the tensor's first one in memory, ``program`` the program
    ids.
    """

    def __init__(self, kind: str, tensor: str, index: int, program: tuple[int, ...], what: str, kernel: str) -> None:
        super().__init__(f"{what} (in program {program} of {kernel})")
        self.kind = kind
        self.tensor = tensor
        self.index = index
        self.program = program
