"""What was replaced in a model, how it is undone, and how a module is known: by what it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_CLOSE = 2e-2  # of the largest number: what a module may differ by from the formula, in 16 bits
_ROWS = 3


@dataclass
class Replacement:
    """What `replace` did: how many places of each part, and of the others why not; ``restore()`` undoes it."""

    done: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Put back what was there, in the reverse order; a second time nothing happens."""
        while self.undo:
            self.undo.pop()()

    def __str__(self) -> str:
        done = ", ".join(f"{count} {name}" for name, count in self.done.items()) or "nothing"
        left = "".join(f"; {name} not: {why}" for name, why in self.left.items())
        return f"{done} replaced{left}"


def set_own(found: Replacement, module: nn.Module, name: str, value: Any) -> None:
    """Give one module an attribute of its own."""
    before = vars(module).get(name)
    setattr(module, name, value)

    def undo() -> None:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)

    found.undo.append(undo)


def noise(weight: Tensor, width: int) -> Tensor:
    """A few rows like a module's input, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(_ROWS, width, generator=generator).to(weight.device, weight.dtype)


def given(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module makes of a batch of one; None where it takes something else."""
    try:
        with torch.no_grad():
            found = module(x[None])
    except Exception:
        return None
    return found[0] if isinstance(found, Tensor) and found.shape == (1, *x.shape) else None


def alike(got: Tensor | None, right: Tensor) -> bool:
    if got is None or got.shape != right.shape:
        return False
    error = (got.double() - right.double()).abs().max()
    return bool(error <= _CLOSE * right.double().abs().max())
