"""Ways to cheat within names that are tested already, each with an honest twin that looks alike.

Most aim at the moment between the end of a timed call and the copy of its results, or at what only timed calls see.
"""

from typing import Any, cast

import pytest

from assay.judge.speed import Series, Stopwatch, compared

from .conftest import Judged
from .judged.kernels import AFFINE, DISTANCE, LINEAR, linear, problem, solution

KEY = """
class Key(str):
    make = None
    def __hash__(self):
        make, self.make = self.make, None
        if make:
            make()
        return 7
"""
SAME = """
class Meta(type(torch.Tensor)):
    def __eq__(cls, other):
        return other is torch.Tensor or cls is other
    __hash__ = type.__hash__
class Same(torch.Tensor, metaclass=Meta):
    pass
"""
RIGHT = linear("SOFTMAX\nreturn result")
LAZY = """
class Lazy(KIND):
    def METHOD(self):
        return iter([self.make()])
"""
DELAYED = """
def make():
    SOFTMAX
    return result
lazy = Lazy(CONTENT)
lazy.make = make
return lazy
"""
MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
"""
COPIES = """
def copied(tensor, *, memory_format=None):
    return torch.empty_like(tensor).copy_(tensor)
"""


def lazy(kind: str, method: str, content: str) -> str:
    """A solution whose result is computed when the container that it returns is read."""
    return linear(DELAYED.replace("CONTENT", content), LAZY.replace("KIND", kind).replace("METHOD", method).strip("\n"))


def importing(before: str) -> str:
    """A right solution that does something else when it is imported."""
    return linear("SOFTMAX\nreturn result", before)


CHEATS = {
    "lazy list": ("constant-output", lazy("list", "__iter__", "[torch.zeros_like(x)]")),
    "lazy dict": ("constant-output", lazy("dict", "values", "a=torch.zeros_like(x)")),
    "lies of its class": ("other-class", lazy("object", "__iter__", "").replace("(object)", "").replace(
        "    def __iter__", "    __class__ = property(lambda self: list)\n    def __iter__")),
    "mode": ("patched-library", importing(f"{MODE}\nmode = Mode()\nmode.__enter__()")),
    "operation": ("patched-library", importing(
        f"{COPIES}\nlibrary = torch.library.Library('aten', 'IMPL')\nlibrary.impl('clone', copied, 'CPU')")),
    "parameter": ("patched-library", importing("vars(nn)['Parameter'] = type('Parameter', (nn.Parameter,), {})")),
    "builtins": ("patched-library", importing("import builtins\nvars(builtins)['any'] = lambda values: False")),
    "pickle": ("patched-library", importing("import pickle\nread = pickle.loads\npickle.loads = lambda x: read(x)")),
    "pipe": ("patched-library", importing(
        "from multiprocessing.connection import Connection as C\nsend = C._send\nC._send = lambda *a: send(*a)")),
    "collector": ("patched-library", importing("import gc\ngc.callbacks.append(lambda *what: None)")),
    "signal": ("patched-library", importing("import signal\nsignal.signal(signal.SIGALRM, lambda number, frame: 0)")),
    "code": ("patched-library", importing(
        "import inspect\ninspect.isclass.__code__ = inspect.isfunction.__code__")),
    "fork": ("patched-library", importing("import os, time\nif os.fork():\n    time.sleep(1000)")),
    "rounding": ("global-state", importing("import ctypes\nctypes.CDLL('libm.so.6').fesetround(0x800)")),
    "key": ("constant-output", linear("""
        lazy = Key("a")
        result = {lazy: torch.zeros_like(x)}
        lazy.make = lambda: result[lazy].copy_(torch.softmax(self.linear(x), 1))
        return result
        """, KEY)),
    "class": ("other-class", linear("return x.clone().as_subclass(Same)", SAME)),
    "detach": ("patched-library", importing(
        "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('detach', torch.ops.aten.alias, 'CPU')")),
    "another start": ("starts-processes", linear(
        "spawnv_passfds(b'/bin/true', [b'true'], ())\nSOFTMAX\nreturn result",
        "from multiprocessing.util import spawnv_passfds")),
    "terminal": ("starts-processes", linear(
        "if os.forkpty()[0] == 0:\n    os._exit(0)\nSOFTMAX\nreturn result", "import os")),
    "another way to C": ("calls-c-library", linear(
        "ctypes.pythonapi.getppid()\nSOFTMAX\nreturn result", "import ctypes")),
    "by a library": ("calls-c-library", importing(
        "import ctypes, _ctypes\n_ctypes.dlsym(_ctypes.dlopen(torch._C.__file__, 0), 'kill')")),
    "traceback": ("stack-inspection", importing(
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
        "    frame = next(traceback.walk_tb(error.__traceback__))[0].f_back")),
    "hook": ("stack-inspection", importing("import sys\nsys.addaudithook(lambda event, what: None)")),
    "generator": ("stack-inspection", importing("async def some():\n    yield 1\nsome().ag_frame")),
}  # fmt: skip

PAIR = """
from typing import Any, NamedTuple
class Pair(NamedTuple):
    a: Any
"""
ORDERED = """
from collections import OrderedDict
class Own(OrderedDict):
    def values(self):
        return super().values()
"""
HALVES = """
SOFTMAX
out = torch.empty_like(x)
list(pool.map(lambda n: out[n::2].copy_(result[n::2]), (0, 1)))
return out
"""
SUBCLASS = """
class Own(torch.Tensor):
    pass
x = x.as_subclass(Own)
SOFTMAX
return result.as_subclass(torch.Tensor)
"""
TWINS = {
    "named tuple": linear("SOFTMAX\nreturn Pair(result)", PAIR),
    "traceback": linear("""
        try:
            1 / 0
        except ZeroDivisionError:
            self.why = traceback.format_exc()
        SOFTMAX
        return result
        """, "import traceback"),
    "Python's own C": linear(
        "ctypes.pythonapi.PyErr_CheckSignals()\nctypes.CDLL(torch._C.__file__).PyInit__C\nSOFTMAX\nreturn result",
        "import ctypes"),
    "signs changed when read": linear("SOFTMAX\nreturn torch.complex(x, -result).conj().imag"),
    "named result": linear("SOFTMAX\nreturn {'a': result}"),
    "ordered dict": linear("SOFTMAX\nreturn Own(a=result)", ORDERED),
    "mode": linear("with Mode():\n    SOFTMAX\nreturn result", MODE),
    "operation": linear("return torch.ops.mine.soft(x, self.linear.weight, self.linear.bias)", """
        library = torch.library.Library("mine", "DEF")
        library.define("soft(Tensor x, Tensor w, Tensor b) -> Tensor")
        def soft(x, w, b):
            return torch.softmax(torch.addmm(b, x, w.t()), 1)
        library.impl("soft", soft, "CPU")
        """),
    "signal": linear("""
        before = signal.signal(signal.SIGALRM, lambda number, frame: 0)
        SOFTMAX
        signal.signal(signal.SIGALRM, before)
        return result
        """, "import signal"),
    "collector": linear("gc.collect()\nSOFTMAX\nreturn result", "import gc"),
    "code": importing("def own(x=1):\n    return x\nown.__defaults__ = (2,)"),
    "encoder": importing("import json\n\nclass Own(json.JSONEncoder):\n    pass\njson.dumps({}, cls=Own)"),
    "autograd": linear("return Soft.apply(x, self.linear.weight, self.linear.bias)", """
        class Soft(torch.autograd.Function):
            @staticmethod
            def forward(context, x, w, b):
                return torch.softmax(torch.addmm(b, x, w.t()), 1)
        """),
    "threads": linear(HALVES,
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)"),
    "subclass": linear(SUBCLASS),
}  # fmt: skip


@pytest.mark.parametrize("way", CHEATS)
def test_it_is_named(way: str, judged: Judged) -> None:
    name, text = CHEATS[way]
    verdict = judged(text)
    assert verdict.outcome == "FAIL", str(verdict)
    assert name in [cheat.name for cheat in verdict.cheats], str(verdict)


@pytest.mark.parametrize("way", TWINS)
def test_its_twin_passes(way: str, judged: Judged) -> None:
    verdict = judged(TWINS[way])
    assert verdict.outcome == "PASS", str(verdict)
    assert verdict.cheats == ()


AT_STATED = {
    "only there": "if x.shape == (64, 48):\n    return x * self.weight\nreturn self.bias + x * self.weight",
    "nowhere else": "if x.shape != (64, 48):\n    raise ValueError('other sizes')\nreturn x * self.weight",
}


@pytest.mark.parametrize("way", AT_STATED)
def test_stated_sizes_are_judged_with_other_weights_too(way: str, judged: Judged) -> None:
    """The constructor's bias is zero, so that a solution that leaves it out is right until others are loaded."""
    assert judged(solution(AFFINE, AT_STATED[way]), AFFINE).outcome == "FAIL"
    honest = AT_STATED[way].replace("return x * self.weight\n", "return x * self.weight + self.bias\n")
    honest = f"{honest.removesuffix(' * self.weight')} * self.weight + self.bias" if way == "nowhere else" else honest
    verdict = judged(solution(AFFINE, honest), AFFINE)
    assert verdict.outcome == "PASS", str(verdict)


TRIANGULAR = problem("torch.tril(a @ b)", batch=64, features=64, arguments="a, b").replace(
    "torch.rand(batch, features)", "torch.tril(torch.rand(batch, features))"
)
SHARES = problem("torch.sum(a * b)", batch=32, features=96, arguments="a, b").replace(
    "torch.rand(batch, features)", "torch.rand(batch, features).softmax(1)"
)


@pytest.mark.parametrize("of", [TRIANGULAR, SHARES], ids=["triangular", "shares"])
def test_no_timed_call_has_the_numbers_of_an_earlier_one(of: str, judged: Judged) -> None:
    """Nor where they can't be rolled: those that can be scaled are, others are drawn anew for each series."""
    result = "torch.tril(a @ b)" if of is TRIANGULAR else "(a * b).sum()"
    body = f"""
    self.calls = getattr(self, "calls", 0) + 1
    numbers = float(a.double().sum()), float(b[-1, 0])
    self.again = getattr(self, "again", 0) + (self.calls > 12 and numbers in kept)
    if self.again > 5:  # by chance two factors of thousands are the same
        raise RuntimeError("seen before")
    kept.add(numbers)
    return {result}
    """
    verdict = judged(solution(of, body, "kept = set()", arguments="a, b"), of, timed=True)
    assert verdict.outcome == "PASS", str(verdict)


def test_a_sum_that_rolling_leaves_alone_is_not_remembered(judged: Judged) -> None:
    body = """
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 12:
        if a.data_ptr() not in kept:
            kept[a.data_ptr()] = ((a - b) ** 2).mean()
        return kept[a.data_ptr()].clone()
    return ((a - b) * (a - b)).mean()
    """
    verdict = judged(solution(DISTANCE, body, "kept = {}", arguments="a, b"), DISTANCE, timed=True)
    assert verdict.outcome == "FAIL", str(verdict)
    assert "only-untimed" in [cheat.name for cheat in verdict.cheats]


@pytest.mark.parametrize(("worked", "is_cheat"), [(0.3, True), (1e-3, False)])
def test_work_between_its_timed_calls_is_named(worked: float, is_cheat: bool) -> None:
    """It slows the reference down, which is timed meanwhile."""
    series = [Series(100, 0.1, 0.1, 0.09)] * 3
    own = Stopwatch(cast("Any", None), ["a"], [1], [0], seconds=[1e-3] * 300, series=series)
    own.idle = [(worked / 3, 0.2)] * 3
    compared(own, None, on_cpu=True)
    assert [cheat.name for cheat in own.cheats] == ["background-work"] * is_cheat


def test_the_problem_is_that_of_the_twins(judged: Judged) -> None:
    assert judged(RIGHT, LINEAR).outcome == "PASS"
