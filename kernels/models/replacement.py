"""What was replaced in a model, how it is undone, and how a module is known: by what it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_CLOSE = 4.0  # spacings, of a row's largest number: what a module may differ by from the formula
_TF32 = 1e-3  # the same, where float32 products may be rounded to ten bits


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
    """Three rows like a module's input, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, width, generator=generator).to(weight.device, weight.dtype)


def given(module: nn.Module, x: Tensor) -> Tensor | None:
    """What a module makes of a batch of one; None where it takes something else."""
    try:
        with torch.no_grad():
            found = module(x[None])
    except Exception:
        return None
    return found[0] if isinstance(found, Tensor) and found.shape == (1, *x.shape) else None


def alike(got: Tensor | None, right: Tensor) -> bool:
    """Whether each row of what a module gave is the formula's, up to roundings."""
    if got is None or got.shape != right.shape:
        return False
    error, size = (each.double().abs().amax(-1) for each in (got.double() - right.double(), right))
    return bool((error <= max(_CLOSE * torch.finfo(got.dtype).eps, _TF32) * size).all())
