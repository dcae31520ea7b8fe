"""Kernels such as users bring: the tests put this folder on the path of the command."""

import os

import torch
from torch import Tensor


def entry(name: str, function: str, dtype: str = "float32", more: str = "", module: str = "kernels_of_a_user") -> str:
    """A table's row: a function of this module, or another in this folder, as a softmax."""
    target = f'target = "{module}:{function}"'
    return f'[[kernel]]\nname = "{name}"\n{target}\nspec = "softmax"\ndtypes = ["{dtype}"]\n{more}\n'


def honest(x: Tensor) -> Tensor:
    """Keeps its contract."""
    return torch.softmax(x, -1)


def faulty(x: Tensor) -> Tensor:
    """Doesn't shift by the maximum."""
    print("a kernel that prints")
    weights = x.float().exp()
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def crashing(x: Tensor) -> Tensor:
    """Takes the process down."""
    os.abort()


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: str, window: tuple[int, int]) -> Tensor:
    """Insists on a tuple."""
    assert isinstance(window, tuple)
    raise RuntimeError(f"called with {causal} and {window}")
