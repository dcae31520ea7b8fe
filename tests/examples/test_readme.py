"""README's first example prints what stands below it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def example() -> tuple[str, str]:
    """The code of the first example that prints a verdict, and what README shows of it."""
    blocks = re.findall(r"```python\n(.*?)```\n```\n(.*?)```\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    return next((code, shown) for code, shown in blocks if "print(examine(" in code)


def matches(shown: str, printed: str) -> bool:
    """Whether it is printed as it is shown; figures may be another machine's, and three dots stand for anything."""
    words, found = (re.sub(r"\d[\d.]*(e[+-]?\d+)?", "#", text.strip()) for text in (shown, printed))
    return re.fullmatch(".*".join(map(re.escape, words.split("..."))), found, re.S) is not None


def test_the_first_example_prints_what_readme_shows(tmp_path: Path) -> None:
    """As a module, whose function has an importable name; other words wouldn't do."""
    code, shown = example()
    (tmp_path / "kernels.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-c", "import kernels"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert matches(shown, done.stdout), f"{shown}\nbut printed is\n{done.stdout}{done.stderr}"
    assert not matches(shown.replace("special     broken", "special     kept"), done.stdout)
    assert not matches(shown.replace("range broken", "numbers broken"), done.stdout)


def test_a_reference_is_asked_as_readme_says(tmp_path: Path) -> None:
    """The example with a function of one's own passes an honest kernel, and fails one that leaves out the bias."""
    blocks = re.findall(r"```python\n(.*?)```\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    code = next(code for code in blocks if "def reference(" in code)
    kernel = "import torch\nfrom assay.verify import check\n\n\ndef my_fused_kernel(x, bias):\n    return {}\n\n\n"
    for result, status in (
        ("torch.nn.functional.gelu(x.float() + bias.float()).to(x.dtype)", 0),
        ("torch.nn.functional.gelu(x.float()).to(x.dtype)", 1),
    ):
        path = tmp_path / f"kernels{status}.py"
        path.write_text(kernel.format(result) + code, encoding="utf-8")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
