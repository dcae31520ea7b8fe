"""Goldens of a reference don't count any more when anything that it computes by is another."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from assay.golden.lowering import reference_spec
from assay.runtime.source import source_of

TEXT = """
import torch

SCALE = 2.0


def _inner(x):
    return x.exp()


def _outer(x):
    return _inner(x) * SCALE


def reference(x):
    return _outer(x) + 1
"""


def version(folder: Path, text: str) -> int:
    folder.mkdir()
    path = folder / "changing.py"
    path.write_text(text, encoding="utf-8")
    specification = importlib.util.spec_from_file_location("changing", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return reference_spec(module.reference, "x[N] -> y[N]").version


@pytest.mark.parametrize(
    ("old", "new"), [("+ 1", "+ 2"), ("x.exp()", "x.exp2()"), ("SCALE = 2.0", "SCALE = 3.0"), ("* SCALE", "/ SCALE")]
)
def test_the_version_is_another(tmp_path: Path, old: str, new: str) -> None:
    """Of the function itself, of one that it calls by way of another, and of a constant."""
    assert version(tmp_path / "a", TEXT) != version(tmp_path / "b", TEXT.replace(old, new))
    assert version(tmp_path / "c", TEXT) == version(tmp_path / "d", TEXT + "\n\ndef unused(x):\n    return x\n")


def test_a_number_around_a_function_counts() -> None:
    def scaled(factor: float) -> object:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return function

    assert source_of(scaled(2.0)) != source_of(scaled(3.0))


def test_parts_of_a_module_count() -> None:
    """A module is its class, and those of its parts that aren't PyTorch's."""

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.linear = Inner(), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.linear(x))

    text = source_of(Outer())
    assert "return x * 2" in text
    assert "class Linear" not in text
