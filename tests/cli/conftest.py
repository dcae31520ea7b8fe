"""A stored model and an audit of it, and worker processes replaced by this process, for tests of the command."""

import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.cli.main import main
from assay.runtime.environment import environment, put
from assay.runtime.pool import Pool, Raised

HERE = Path(__file__).parent


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the tasks of worker processes in this one, for tests of what a command does with the answers."""

    def run(
        pool: Pool, task: Callable[..., Any], items: Iterable[Any], *, until: float = math.inf
    ) -> Iterator[tuple[int, Any]]:
        for index, item in enumerate(items):
            if time.monotonic() >= until:
                return
            try:
                yield index, task(item, lambda note="", seconds=0.0: None)
            except Exception as error:
                yield index, Raised.of(error)

    monkeypatch.setattr(Pool, "resize", lambda pool, count: None)
    monkeypatch.setattr(Pool, "run", run)
    before = environment()  # workers set their number of threads
    yield
    put(before)


@pytest.fixture
def users_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kernels_of_a_user` can be imported, here and in workers."""
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture
def one_line(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command that fails with exit status 2 and one line, which has a message."""

    def refused(arguments: Sequence[str], *messages: str) -> None:
        capsys.readouterr()
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = [line for line in err.splitlines() if not line.startswith("assay: examined")]  # on a busy machine
        for line, message in zip(lines, messages, strict=True):
            assert line.startswith("assay: ")
            assert message in line

    return refused


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama, stored in bfloat16, and a text."""
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
    from tests.cli.audits import LIMITED, run

    out = tmp_path_factory.mktemp("audited")
    assert run(models, out, *LIMITED, "--export", "torchao,compressed-tensors") == 0
    return out


@pytest.fixture
def again(audited: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to go on in."""
    return shutil.copytree(audited, tmp_path / "again")
