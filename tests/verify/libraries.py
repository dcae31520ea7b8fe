"""Examinations of libraries' own code under the contracts by their names."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assay.verify import Verdict, examine

DTYPES = ("bfloat16", "float16", "float32")
ROWS: dict[str, Any] = {"shapes": {"R": [1, 4, 7], "N": [2, 8, 33, 64]}}
SMALL: dict[str, Any] = {
    "shapes": {"B": [2], "Hkv": [2], "H": [4], "Sq": range(1, 24), "Sk": range(1, 24), "D": [16], "Dv": [16]}
}


def judged(kernel: Callable[..., Any], op: str, contract: str, dtype: str, settings: dict[str, Any]) -> Verdict:
    """A short examination; the rest is as `examine` has it."""
    asked: dict[str, Any] = {"effort": "quick", "examples": 0, "every_aspect": False, "shrinking": False}
    return examine(kernel, op, dtype=dtype, contract=contract, **asked, **settings)


def rounding_more(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel, whose result is stored three times as large, and then as it is; of float32 in bfloat16."""

    def rounding(*tensors: Tensor, **options: Any) -> Tensor:
        y = kernel(*tensors, **options)
        return y.to(torch.bfloat16).to(y.dtype) if y.dtype == torch.float32 else (y * 3) / 3

    return rounding
