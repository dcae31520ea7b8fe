"""Whole commands that are generated, with files that nobody meant: one line and the right exit status, at once.

`ASSAY_COMMANDS` sets how many are tried: 2,000 take some minutes.
"""

import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, note
from hypothesis import settings as unhurried
from hypothesis import strategies as st

from assay.cli.main import app, main
from assay.runtime.environment import environment, put

LONGEST = 30.0  # seconds of one command, on a busy machine
KERNEL = "kernels_of_a_user:honest"
CAMPAIGN = 'seeds = 1\n[[golden]]\nname = "a"\nspec = "softmax"\nshapes = [{R = 1, N = 3}]\ndtypes = ["bfloat16"]\n'
TABLE = (
    f'[[kernel]]\nname = "a"\ntarget = "{KERNEL}"\nspec = "softmax"\ndtypes = ["float32"]\nshapes = ["R=1", "N=3"]\n'
)
CASE = {"spec": "softmax", "sizes": {"R": 1, "N": 3}, "dtypes": {"x": "float32"}}
REPRO = json.dumps({"target": KERNEL, "case": CASE})
LIST = '{"problem": "problem.py", "solution": "notes", "id": 1}\n{"problem": "missing.py", "solution": "notes"}\n'
PROBLEM = """import torch
R, N = 4, 8
class Model(torch.nn.Module):
    def forward(self, x): return torch.relu(x)
def get_inputs(): return [torch.randn(R, N)]
def get_init_inputs(): return []
"""
DEFINITION = json.dumps(
    {"name": "relu", "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 8}},
     "inputs": {"x": {"shape": ["M", "N"], "dtype": "float32"}},
     "outputs": {"y": {"shape": ["M", "N"], "dtype": "float32"}},
     "reference": "import torch\ndef run(x):\n    return torch.relu(x)\n"}
)  # fmt: skip
MODEL = '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}'
SPLINTERS = (
    '"', "'", "\n", "\r", "\f", "\0", "\t", "[", "]", "{", "}", "(", ")", "=", ",", ":", "-", ".", "#", "\\", "\\u0000",
    "\\ud800", "\ud800", "\x1b[31m", "\u2028", "é", "😀", "9" * 30, "9" * 5000, "1e999", "nan", "-inf", "null", "true",
    "[" * 5000, '{"a":' * 2000, "9**9**9", "-1", "0", "../../etc/passwd", "__class__", "%s%n", "*" * 40,
)  # fmt: skip
FILES = (
    "made.toml", "made.jsonl", "made.json", "made.py", "problem.py", "notes", "empty", "folder", "pipe", "loop",
    "missing", "/dev/null", "/dev/full", "/proc/self/mem", "no/such/folder", "model", "binary", "",
)  # fmt: skip
WORDS = (
    "", " ", "nan", "inf", "-1", "0", "1e400", "1e300", "9" * 40, "x", "=", "a=b", "R=nan", "N=-5", "N=1:2:0",
    "N=" + "9" * 5000, "softmax", "float99", "x=", ":", "os:system", "a\nb", "\x1b[31mred", "\udcff", "x" * 5000,
    "ключ→😀", "0/0", "a/b", "11/10", "(", "[", '{"', "[]", "null", "allclose(nan,nan)", "__import__('os')",
    "9**9**9**9", "../..", "ftp://", "zip://", "foo://bar", "%",
)  # fmt: skip
BASES = (
    f"verify {KERNEL} --spec softmax --dtype float32 --effort quick --examples 0 --shape R=1 --shape N=3",
    "verify made.toml --effort quick --examples 0",
    "verify WORD --spec WORD",
    f"verify {KERNEL} --reference {KERNEL} --tensors WORD --effort quick --examples 0",
    "golden build made.toml --store store --workers 1",
    "golden build FILE --store WORD --workers 1",
    "golden check FILE",
    "golden show FILE WORD",
    "golden discard FILE WORD",
    "golden diff FILE FILE",
    "judge --list made.jsonl --effort quick --no-timing --jobs 1",
    "judge made.py notes --effort quick --no-timing",
    "judge made.json notes --effort quick --no-timing",
    "judge FILE FILE --effort quick --no-timing",
    "repro WORD",
    "repro MADE",
    "power --spec WORD",
    "fingerprint WORD --spec WORD",
    "inspect WORD",
    "bench WORD --spec softmax --seconds 0.01",
    "bench --compare FILE --seconds 0.01",
    "tune WORD --spec softmax",
    f"tune {KERNEL} --spec softmax --replay FILE",
    "survey --table FILE --out out",
    "survey --only nothing --out out",
    "audit model --text notes --out out --quick",
    "audit FILE --text FILE --out out --quick",
    "audit --compare FILE FILE",
)
VALID = {"toml": (CAMPAIGN, TABLE), "jsonl": (LIST,), "json": (DEFINITION,), "py": (PROBLEM,), "model": (MODEL,)}


def _commands() -> Iterator[tuple[list[str], Any]]:
    waiting: list[tuple[list[str], Any]] = [([], typer.main.get_command(app))]
    while waiting:
        names, command = waiting.pop()
        yield names, command
        waiting += [([*names, name], each) for name, each in getattr(command, "commands", {}).items()]


OPTIONS = {
    " ".join(names): [
        (option.opts[0], bool(option.is_flag)) for option in command.params if option.param_type_name == "option"
    ]
    for names, command in _commands()
}


@st.composite
def damaged(draw: st.DrawFn, valid: Sequence[str]) -> str:
    """A text of a kind, with pieces cut out, put in or repeated; sometimes as it was."""
    text = draw(st.sampled_from(valid))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        middle = draw(st.sampled_from(SPLINTERS) | st.text(max_size=4) | st.just(text[start:end] * 2))
        text = text[:start] + middle + text[end:]
    return text


@st.composite
def commands(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """A command line, and the content of the files `made.*`."""
    files = {kind: draw(damaged(valid)) for kind, valid in VALID.items()}
    base = draw(st.sampled_from(BASES))
    arguments = []
    for word in shlex.split(base):
        made = {"FILE": st.sampled_from(FILES), "WORD": st.sampled_from(WORDS) | st.text(max_size=8)}
        made["MADE"] = damaged((REPRO,))
        arguments.append(draw(made[word]) if word in made else word)
    command = " ".join(arguments[: 2 if arguments[0] == "golden" else 1])
    for _ in range(draw(st.integers(0, 2)) if OPTIONS[command] else 0):
        name, is_flag = draw(st.sampled_from(OPTIONS[command]))
        arguments.append(name)
        if not is_flag:
            arguments.append(draw(st.sampled_from(WORDS) | st.sampled_from(FILES)))
    return arguments, files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("my notes")
    Path("empty").touch()
    Path("binary").write_bytes(bytes(range(256)) * 8)
    Path("problem.py").write_text(PROBLEM)
    for name in ("folder", "model"):
        Path(name).mkdir()
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    return tmp_path


@pytest.mark.usefixtures("in_process", "users_kernels", "folder")
@unhurried(
    max_examples=int(os.environ.get("ASSAY_COMMANDS", "15")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(made=commands())
def test_a_generated_command_ends_in_one_line(
    made: tuple[list[str], dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, files = made
    for kind, text in files.items():
        path = Path("model/config.json" if kind == "model" else f"made.{kind}")
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    note(shlex.join(arguments))
    before, begun = environment(), time.monotonic()
    capsys.readouterr()
    status = main(arguments)
    put(before)
    out, err = capsys.readouterr()
    note(f"status {status}\n{out}\n{err}")
    assert time.monotonic() - begun < LONGEST
    assert status in (0, 1, 2)
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err
    if status == 2:
        assert len([line for line in err.splitlines() if line.startswith("assay: ")]) == 1, "one line of ours"
    assert Path("notes").read_text() == "my notes"
    assert Path("problem.py").read_text() == PROBLEM
