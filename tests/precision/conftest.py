"""Stored models that several tests load."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from assay.precision.loading import Loaded, bundled, load


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random models in bfloat16, each stored once, with the tokenizer of the bundled models."""
    home = tmp_path_factory.mktemp("models")

    def store(kind: str) -> Path:
        if not (home / kind).is_dir():
            from tests.precision.tiny_models import MODELS

            torch.manual_seed(0)
            MODELS[kind]().bfloat16().save_pretrained(home / kind)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(bundled()["stdlib-llama"] / file, home / kind)
        return home / kind

    return store


@pytest.fixture(scope="session")
def stdlib_llama() -> Loaded:
    """The bundled Llama, which no test may change."""
    return load("stdlib-llama")


@pytest.fixture
def llama(stored: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may damage."""
    return shutil.copytree(stored("llama"), tmp_path / "llama")
