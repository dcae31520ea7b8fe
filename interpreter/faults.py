"""Errors of a launch: what the sanitizer finds, with what it takes to find the place, and what isn't interpreted."""

from __future__ import annotations

from assay.runtime.errors import AssayError


class NotInterpreted(AssayError, NotImplementedError):
    """The interpreter can't run a kernel that a compiler takes, or the installed Triton lacks what the kernel needs.

    The message names what is missing, in one line.
    """


class SanitizerError(AssayError, RuntimeError):
    """A kernel's access to memory that no GPU promises to survive or to repeat.

    ``kind`` is that of a failure of `assay.verify.examine`: "out_of_bounds_write", "crash" (a load out of bounds),
    "unwritten_output" (a load of what nobody has written) or "nondeterministic" (a race between programs). ``tensor``
    is the kernel's parameter, ``index`` the element counted from the tensor's first one in memory, ``program`` the
    place in the grid.
    """

    def __init__(self, kind: str, tensor: str, index: int, program: tuple[int, ...], what: str, kernel: str) -> None:
        super().__init__(f"{what} (in program {program} of {kernel})")
        self.kind = kind
        self.tensor = tensor
        self.index = index
        self.program = program
