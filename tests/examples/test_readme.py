"""README's first examples print and decide what README says."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from assay.verify.errors import VerificationError

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def matches(shown: str, printed: str) -> bool:
    """Return whether a text is printed as shown; numbers may be another machine's, and "..." is any text."""
    words, found = (re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", text.strip()) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, words.split("..."))), found, re.S) is not None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the module `kernels` that a test imports; another module of that name may be imported already."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    return tmp_path


def test_the_first_example_prints_what_readme_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a module, whose function has an importable name; other words would not match."""
    blocks = re.findall(r"```python\n(.*?)```\n```\n(.*?)```\n", README, re.S)
    code, shown = next((code, shown) for code, shown in blocks if "print(examine(" in code)
    (folder / "kernels.py").write_text(code, encoding="utf-8")
    importlib.import_module("kernels")
    del sys.modules["kernels"]
    printed = capsys.readouterr().out
    assert matches(shown, printed), f"{shown}\nbut printed is\n{printed}"
    assert not matches(shown.replace("special     broken", "special     kept"), printed)
    assert not matches(shown.replace("range broken", "numbers broken"), printed)


def test_an_own_reference_decides_as_readme_says(folder: Path) -> None:
    """The example passes a correct kernel, and fails one without the bias."""
    code = next(code for code in re.findall(r"```python\n(.*?)```\n", README, re.S) if "def reference(" in code)
    kernel = "import torch\nfrom assay.verify import check\n\n\ndef my_fused_kernel(x, bias):\n    return {}\n\n\n"
    for name, result in (("right", "x.float() + bias.float()"), ("wrong", "x.float()")):
        source = kernel.format(f"torch.nn.functional.gelu({result}).to(x.dtype)") + code
        (folder / f"readme_{name}.py").write_text(source, encoding="utf-8")
    importlib.import_module("readme_right")
    with pytest.raises(VerificationError):
        importlib.import_module("readme_wrong")
