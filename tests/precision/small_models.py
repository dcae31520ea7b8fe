"""Models of a few linears, audited in moments, for what is about an audit's answers rather than the model."""

from collections.abc import Callable
from typing import Any

import torch

FORMATS = ("bf16", "fp8", "w8a16", "w4a16-g32")


class Layer(torch.nn.Module):
    """A linear behind a norm, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.proj = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.proj(self.norm(x)).tanh()


class Model(torch.nn.Module):
    """Three layers and a head; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.head = torch.nn.Linear(32, 16)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made() -> tuple[Model, list[torch.Tensor]]:
    """The model and two batches of four sequences of eight positions, the same every time."""
    torch.manual_seed(0)
    return Model(), [torch.randn(4, 8, 32) for _ in range(2)]


class Made(torch.nn.Module):
    """Parts, by name, and a forward pass that is a function of the module and its inputs."""

    def __init__(self, run: Callable[..., torch.Tensor], **parts: torch.nn.Module | torch.nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.run(self, *args, **kwargs)


class Between(Made):
    """Two linears with something between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor], **parts: torch.nn.Module) -> None:
        super().__init__(lambda m, x: m.last(m.between(m, m.first(x))), **parts)
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)
        self.between = between
