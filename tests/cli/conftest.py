"""A stored model and an audit of it, which several tests of the command start from."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, stored in bfloat16, and a text."""
    import torch

    from assay.precision.loading import bundled
    from tests.precision.tiny_models import MODELS, TEXT

    home = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    model = MODELS["llama"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.bfloat16().save_pretrained(home / "llama")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled()["stdlib-llama"] / file, home / "llama")
    (home / "text.txt").write_text(TEXT)
    return home


@pytest.fixture(scope="session")
def audited(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an audit under a budget of the error, with exports."""
    from assay.cli.main import main
    from tests.cli.audits import FEW

    out = tmp_path_factory.mktemp("audited")
    arguments = ("audit", str(models / "llama"), "--text", str(models / "text.txt"), "--out", str(out), *FEW)
    assert main((*arguments, "--max-kl", "0.01", "--target", "h200", "--export", "torchao,compressed-tensors")) == 0
    return out


@pytest.fixture
def again(audited: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to go on in."""
    return shutil.copytree(audited, tmp_path / "again")
