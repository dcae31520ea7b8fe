"""What a solution asks of the system is laid to it, whichever way it asks; what libraries do for themselves is not."""

from pathlib import Path

import pytest

from assay.judge.procedure import judge
from assay.judge.verdict import SolutionVerdict

from .judged.kernels import LINEAR, linear


def judged(folder: Path, text: str) -> SolutionVerdict:
    (folder / "problem.py").write_text(LINEAR)
    (folder / "solution.py").write_text(text)
    return judge(folder / "problem.py", folder / "solution.py", effort="quick", timed=False)


def calling(line: str, before: str = "") -> str:
    return linear(f"SOFTMAX\n{line}\nreturn result", before)


@pytest.mark.parametrize(
    "read",
    [
        "exec(\"open('PATH').read()\")",
        "eval(compile(\"open('PATH').read()\", torch.__file__, 'eval'))",
        "torch.from_file('PATH', size=1, dtype=torch.uint8) if False else numpy.fromfile('PATH', dtype='uint8')",
        "[open(name).close() for name in ['/dev/null', __file__] * 60]\nopen('PATH').close()",
        "os.path.exists('link') or os.symlink('PATH', 'link')\nopen('link').close()",
        "os.path.exists('hard') or os.link('PATH', 'hard')\nopen('hard').close()",
        "os.listdir('/proc')",
        "open('/proc/self/maps').close()",
        "work = Thread(target=os.listdir, args=('PARENT',))\nwork.start()\nwork.join()",
        "glob.glob('PARENT/*.py')",
        "torch.load(__file__.replace('solution.py', 'made.pt'), weights_only=False)",
    ],
    ids=["exec", "named", "numpy", "flood", "symlink", "link", "proc", "maps", "thread", "glob", "load"],
)
def test_a_file_that_is_read_by_whichever_way_is_seen(tmp_path: Path, read: str) -> None:
    """Also where it lies in the folder for temporary files, behind a link, or after many harmless ones."""
    made = """
    import glob, os
    from threading import Thread
    import numpy

    class Reads:
        def __reduce__(self):
            return numpy.fromfile, ('PATH', 'uint8')

    torch.save(Reads(), __file__.replace('solution.py', 'made.pt'))
    """
    names = {"PATH": str(tmp_path / "problem.py"), "PARENT": str(tmp_path)}
    text = calling(read, made)
    for name, path in names.items():
        text = text.replace(name, path)
    verdict = judged(tmp_path, text)
    assert [cheat.name for cheat in verdict.cheats] == ["reads-files"], str(verdict)


@pytest.mark.parametrize(
    "look",
    [
        "exec('import sys; sys._getframe(0)', {})",
        "exec(compile('import sys; sys._getframe(0)', '<frozen os>', 'exec'), {'__name__': 'os'})",
        "exec('import inspect; inspect.stack()', {})",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    error.__traceback__.tb_frame",
    ],
    ids=["exec", "frozen", "inspect", "traceback"],
)
def test_a_look_at_the_stack_by_whichever_way_is_seen(tmp_path: Path, look: str) -> None:
    """By a text that is made as it runs, whatever name that has, or by an error's frames."""
    verdict = judged(tmp_path, calling(look))
    assert [cheat.name for cheat in verdict.cheats] == ["stack-inspection"], str(verdict)


def test_what_judges_may_not_be_imported(tmp_path: Path) -> None:
    before = "import importlib\ntry:\n    importlib.import_module('as' + 'say')\nexcept ImportError:\n    pass"
    verdict = judged(tmp_path, calling("pass", before))
    assert "reference-imported" in [cheat.name for cheat in verdict.cheats], str(verdict)


@pytest.mark.parametrize(
    "line",
    [
        "with tempfile.TemporaryDirectory() as folder:\n    torch.save(x, path := folder + '/x')\n    torch.load(path)",
        "with open('notes.txt', 'w') as file:\n    file.write('x')\nopen('notes.txt').close()",
        "json.loads('{}')\nlogging.getLogger('x').info('y')\nwarnings.catch_warnings()",
        "open('/proc/cpuinfo').close()\nos.cpu_count()",
        "import sysconfig, colorsys, wave",
        "collections.namedtuple('Pair', 'a b')\ndataclasses.make_dataclass('Both', ['a'])",
        "stack = inspect.stack",
        "torch.compile(lambda v: v + 1, backend='eager')(x)",
        "F = dataclasses.make_dataclass('Flags', ['fast'], namespace={})\nF.fast = True",
    ],
    ids=["temporary", "own", "logging", "machine", "imports", "made", "unused", "compiled", "local"],
)
def test_what_libraries_do_for_themselves_is_no_cheat(tmp_path: Path, line: str) -> None:
    """Files of its own, what tells of the machine, imports, and names that are only mentioned."""
    before = "import collections, dataclasses, inspect, json, logging, os, tempfile, warnings"
    verdict = judged(tmp_path, calling(line, before))
    assert verdict.outcome == "PASS", str(verdict)


def test_settings_of_the_compiler_are_no_patches(tmp_path: Path) -> None:
    verdict = judged(
        tmp_path, calling("pass", "import torch._inductor.config\ntorch._inductor.config.max_autotune = True")
    )
    assert verdict.outcome == "PASS", str(verdict)
    verdict = judged(tmp_path, calling("pass", "import torch.nn.functional as F\nF.softmax = lambda *a, **k: a[0]"))
    assert "patched-library" in [cheat.name for cheat in verdict.cheats], str(verdict)
