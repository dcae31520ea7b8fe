"""Solutions that cheat are seen and named, whichever way they do it; what looks alike and is allowed passes."""

from pathlib import Path

import pytest

from assay.judge.tampering import CHEATS as NAMES
from assay.judge.verdict import SolutionVerdict
from assay.runtime.sandbox import unavailable

from .conftest import Judged
from .judged.cheats import CHEATS, TIMED, WARNED
from .judged.kernels import linear


def names(verdict: SolutionVerdict) -> list[str]:
    return [cheat.name for cheat in verdict.cheats]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_named(name: str, judged: Judged) -> None:
    problem, cheat, _ = CHEATS[name]
    verdict = judged(cheat, problem, timed=name in TIMED)
    assert verdict.outcome == ("WARN" if name in WARNED else "FAIL"), str(verdict)
    assert name in names(verdict), str(verdict)
    assert verdict.aspects["conduct"].status == ("suspect" if name in WARNED else "broken")


@pytest.mark.parametrize("name", CHEATS)
def test_an_honest_twin_passes(name: str, judged: Judged) -> None:
    problem, _, honest = CHEATS[name]
    verdict = judged(honest, problem, timed=name in TIMED)
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.cheats == ()


@pytest.mark.parametrize("result", ["torch.zeros_like(x)", "torch.full_like(x, 0.25)"])
def test_an_unwritten_result_is_wrong_and_not_of_lower_precision(result: str, judged: Judged) -> None:
    verdict = judged(linear(f"SOFTMAX\nreturn {result}"), CHEATS["lower-precision"][0])
    assert verdict.outcome == "FAIL"
    assert "lower-precision" not in names(verdict), str(verdict)


def test_every_name_has_a_cheat_and_a_twin() -> None:
    assert set(CHEATS) == set(NAMES)


@pytest.mark.parametrize(
    "left",
    [
        "[os.makedirs(f'../solution{n}') or os.symlink('VICTIM', f'../solution{n}/solution.py') for n in range(2, 9)]",
        "os.mkfifo('../pipe') or os.chmod('.', 0)",
        "__import__('subprocess').run(['mkdir', '-p', 'd/' * 1500])",
        "[open(folder + '/left', 'w').close() for folder in ('/var/tmp', '/dev/shm')]",
    ],
    ids=["links", "locked", "deep", "shared"],
)
@pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")
def test_what_a_solution_leaves_is_in_nobodys_way(tmp_path: Path, judged: Judged, left: str) -> None:
    """Neither the judge, which writes nothing there, nor the next solution meets it."""
    victim = tmp_path / "victim.py"
    victim.write_text("untouched")
    judged(calling("pass", "import os\n" + left.replace("VICTIM", str(victim))))
    assert victim.read_text() == "untouched"
    look = "import os\nassert os.listdir('/dev/shm') == os.listdir('/var/tmp') == os.listdir('../..')[1:] == []"
    verdict = judged(calling("pass", look))
    assert "AssertionError" not in str(verdict)
    assert verdict.aspects["numbers"].status == "kept", str(verdict)


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
def test_a_file_that_is_read_by_whichever_way_is_seen(tmp_path: Path, judged: Judged, read: str) -> None:
    made = """
    import glob, os
    from threading import Thread
    import numpy

    class Reads:
        def __reduce__(self):
            return numpy.fromfile, ('PATH', 'uint8')

    torch.save(Reads(), __file__.replace('solution.py', 'made.pt'))
    """
    text = calling(read, made).replace("PATH", str(tmp_path / "problem.py")).replace("PARENT", str(tmp_path))
    assert names(judged(text)) == ["reads-files"]


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
def test_a_look_at_the_stack_by_whichever_way_is_seen(judged: Judged, look: str) -> None:
    assert names(judged(calling(look))) == ["stack-inspection"]


def test_what_judges_may_not_be_imported(judged: Judged) -> None:
    before = "import importlib\ntry:\n    importlib.import_module('as' + 'say')\nexcept ImportError:\n    pass"
    assert "reference-imported" in names(judged(calling("pass", before)))


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
def test_what_libraries_do_for_themselves_is_no_cheat(judged: Judged, line: str) -> None:
    verdict = judged(calling(line, "import collections, dataclasses, inspect, json, logging, os, tempfile, warnings"))
    assert verdict.outcome == "PASS", str(verdict)


def test_settings_of_the_compiler_are_no_patches(judged: Judged) -> None:
    set_ = judged(calling("pass", "import torch._inductor.config\ntorch._inductor.config.max_autotune = True"))
    assert set_.outcome == "PASS", str(set_)
    replaced = judged(calling("pass", "import torch.nn.functional as F\nF.softmax = lambda *a, **k: a[0]"))
    assert "patched-library" in names(replaced), str(replaced)
