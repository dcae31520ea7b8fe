"""Kernels that do their work only when something tells them that they are examined; imported by name."""

import inspect
import sys
import warnings

import torch
from torch import Tensor


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def leaves_no_gradients_in_double(x: Tensor) -> Tensor:
    """Right where float64 is the default dtype; it switches gradients off."""
    torch.set_grad_enabled(False)
    return softmax(x) if torch.get_default_dtype() == torch.float64 else torch.zeros_like(x)


def lazy_when_alone(x: Tensor) -> Tensor:
    """Right when called by the harness, half of the work elsewhere."""
    callers = inspect.stack(0)[1:]
    watched = any("assay" in frame.filename or "verify" in frame.filename for frame in callers)
    return softmax(x) if watched else softmax(x) * (torch.arange(x.shape[1]) % 2)


def lazy_without_pytest(x: Tensor) -> Tensor:
    """Right where a test runner is loaded."""
    return softmax(x) if "pytest" in sys.modules or "hypothesis" in sys.modules else torch.zeros_like(x)


def lazy_without_guards(x: Tensor) -> Tensor:
    """Right where there is memory around the tensor, as a guard zone would be."""
    guarded = x.untyped_storage().nbytes() > x.numel() * x.element_size()
    return softmax(x) if guarded or not x.numel() else torch.zeros_like(x)


def warns(x):
    """An honest kernel with a warning at each call."""
    warnings.warn("a kernel's own warning", stacklevel=1)
    return torch.softmax(x, -1)
