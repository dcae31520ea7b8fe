"""A reference with its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """``reference`` with its ``tensors``, a kernel that is right and, by what is wrong with them, kernels that aren't.

    Of those that ``warned`` names, the first case that fails is one of NaN, infinities or subnormals, of which the
    default contract only warns.
    """

    reference: Kernel
    tensors: str
    honest: Kernel
    faulty: Mapping[str, Kernel]
    dtype: str = "float32"
    warned: frozenset[str] = frozenset()
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.reference.__name__
