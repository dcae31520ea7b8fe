"""Every way of launching a Triton kernel that libraries use, in the interpreter."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import InterpreterError

from assay.interpreter import configurations, faithful


@triton.jit
def scale_kernel(x, y, n, factor, BLOCK: tl.constexpr, ADD: tl.constexpr = 0):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor + ADD, mask=i < n)


X = torch.arange(20.0)


def grid_of(meta: dict[str, Any]) -> tuple[int]:
    """Programs for `X`."""
    return (triton.cdiv(X.numel(), meta["BLOCK"]),)


def test_a_result_is_launched_again() -> None:
    with faithful():
        y = torch.zeros_like(X)
        kernel = scale_kernel[grid_of](X, y, 20, 2.0, BLOCK=16, ADD=1)
        assert torch.equal(y, 2 * X + 1)
        kernel[(2, 1, 1)](X, y, 20, 3.0)
        assert torch.equal(y, 3 * X + 1)
        kernel[(2, 1, 1)](X, y, 20, 3.0, 16, 5)
        assert torch.equal(y, 3 * X + 5)
        kernel.run(2, 1, 1, 0, kernel.function, kernel.packed_metadata, None, None, None, X, y, 20, 4.0, 16, 0)
        assert torch.equal(y, 4 * X)
        with pytest.raises(TypeError, match="scale_kernel: expected 6 arguments, or 4 without constants, got 2"):
            kernel[(2, 1, 1)](X, y)


def test_a_warmed_up_kernel_tells_what_the_compiler_knows() -> None:
    """As in Triton's tutorial on softmax: warm up, ask for registers, launch with a grid of one's own."""
    with faithful(pretend="cuda"):
        x = torch.arange(20.0, device="cuda")
        y = torch.zeros_like(x)
        kernel = scale_kernel.warmup(x, y, 20, 2.0, BLOCK=16, num_warps=2, grid=(1,))
        assert not y.any()
        kernel._init_handles()
        assert 0 < kernel.n_regs < 256
        assert (kernel.n_spills, kernel.metadata.num_warps, kernel.metadata.target.arch) == (0, 2, 90)
        assert kernel.metadata.shared >= 0
        assert "scale_kernel" in kernel.asm["ptx"]
        kernel[(2, 1, 1)](x, y, 20, 2.0, 16, 0)
        assert torch.equal(y, 2 * x)
    assert not scale_kernel.device_caches


class Entry(triton.KernelInterface):  # type: ignore[misc]
    """A cache of launches around a kernel, as FlagGems' `LibEntry` is one."""

    def __init__(self, fn: Any) -> None:
        self.fn, self.kept = fn, {}

    def run(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        if "kernel" not in self.kept:
            self.kept["kernel"] = self.fn.run(*args, grid=grid, **kwargs)
        else:
            self.kept["kernel"][grid(kwargs)](*args)
        return self.kept["kernel"]


class Tuner(Autotuner):  # type: ignore[misc]
    """A tuner with a way of its own of running, as FlagGems' `LibTuner` is one."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        timings = {config: self._bench(*args, config=config, **kwargs) for config in self.prune_configs(kwargs)}
        self.best_config = min(timings, key=timings.__getitem__)
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


class Guess(Heuristics):  # type: ignore[misc]
    """Heuristics with a way of their own of running."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, **kwargs)


CONFIGS = [triton.Config({"BLOCK": size}) for size in (8, 16, 32)]


def tuner(kind: Any) -> Any:
    """The kernel with a tuner of that class."""
    return kind(scale_kernel, scale_kernel.arg_names, CONFIGS, ["n"], None, None)


@pytest.mark.parametrize(
    ("launcher", "constants"),
    [
        (scale_kernel, {"BLOCK": 16}),
        (Entry(scale_kernel), {"BLOCK": 16}),
        (tuner(Autotuner), {}),
        (tuner(Tuner), {}),
        (Entry(tuner(Tuner)), {}),
        (Guess(scale_kernel, scale_kernel.arg_names, {"BLOCK": lambda args: 16}), {}),
    ],
    ids=["plain", "cache", "tuner", "own tuner", "cache of an own tuner", "heuristics"],
)
@pytest.mark.parametrize("pretend", ["", "cuda"])
def test_a_launcher_of_ones_own_works(launcher: Any, constants: dict[str, int], pretend: str) -> None:
    with faithful(pretend=pretend):
        for factor in (2.0, 2.0, 3.0):
            y = torch.zeros_like(X)
            meta = constants or {"BLOCK": 8}
            launcher[lambda _, meta=meta: grid_of(meta)](X, y, 20, factor, **constants)
            assert torch.equal(y, factor * X)


def test_a_tuner_of_ones_own_tries_each_configuration() -> None:
    """Over many keys each of a subclass's configurations is the quickest once."""
    own, seen = tuner(Tuner), set()
    with faithful():
        for n in range(1, 21):
            own[(1,)](X, torch.zeros_like(X), n, 2.0)
            seen.add(own.best_config.kwargs["BLOCK"])
    assert seen == {8, 16, 32}


@triton.jit
def small_blocks_kernel(x, y, n, factor, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    tl.static_assert(BLOCK <= LIMIT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, factor * tl.load(x + i, mask=i < n), mask=i < n)


def test_the_picked_configuration_is_one_that_pruning_leaves() -> None:
    keep = {"early_config_prune": lambda configs, nargs, **_: [c for c in configs if c.kwargs["BLOCK"] != 8]}
    own = Tuner(small_blocks_kernel, small_blocks_kernel.arg_names, CONFIGS, ["n"], None, None, prune_configs_by=keep)
    seen = set()
    with faithful():
        for n in range(1, 13):
            own[(3,)](X, torch.zeros_like(X), n, 2.0, LIMIT=16)
            seen.add(own.best_config.kwargs["BLOCK"])
    assert seen == {16}


@pytest.mark.parametrize("kind", [Autotuner, Tuner])
def test_a_configuration_that_does_not_compile_is_not_taken(kind: Any) -> None:
    own, seen = kind(small_blocks_kernel, small_blocks_kernel.arg_names, CONFIGS, ["n"], None, None), set()
    with faithful():
        for n in range(1, 13):
            own[(3,)](X, torch.zeros_like(X), n, 2.0, LIMIT=16)
            seen.add(own.best_config.kwargs["BLOCK"])
        assert seen == {8, 16}
        with pytest.raises(InterpreterError, match="AssertionError"):
            own[(3,)](X, torch.zeros_like(X), 4, 2.0, LIMIT=4)


def test_the_compiler_is_asked_once_for_the_same_types_and_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = Autotuner(small_blocks_kernel, small_blocks_kernel.arg_names, CONFIGS, ["n"], None, None), []
    monkeypatch.setattr(configurations, "_accepted", {})
    monkeypatch.setattr(configurations, "compiles", lambda *question: asked.append(question) or True)
    with faithful():
        for n in (2, 2, 2, 3, 3):
            own[(3,)](X, torch.zeros_like(X), n, 2.0, LIMIT=16)
        first = len(asked)
        assert 1 <= first <= len(CONFIGS)
        own[(3,)](X, torch.zeros_like(X), 2, 2.0, LIMIT=32)
        assert len(asked) == first + 1


@torch.library.triton_op("assay_launchers::scaled", mutates_args={})
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor * x`` by an operator that torch knows to be Triton's."""
    y = torch.zeros_like(x)
    torch.library.wrap_triton(scale_kernel)[(2,)](x, y, x.numel(), factor, BLOCK=16)
    return y


def launched(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor * x`` by a launch."""
    y = torch.zeros_like(x)
    scale_kernel[(2,)](x, y, x.numel(), factor, BLOCK=16)
    return y


def tuned(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor * x`` by an autotuned launch."""
    y = torch.zeros_like(x)
    TUNED[(3,)](x, y, x.numel(), factor)
    return y


TUNED = tuner(Autotuner)
COMPILED = [
    scaled,
    torch.compile(scaled),
    torch.compile(launched),
    torch.compile(launched, fullgraph=True, dynamic=True),
    torch.compile(tuned),
]


@pytest.mark.parametrize("pretend", ["", "cuda"])
@pytest.mark.parametrize("function", COMPILED, ids=["op", "compiled op", "compiled", "whole", "tuned"])
def test_operators_and_compiled_callers(function: Any, pretend: str) -> None:
    with faithful(pretend=pretend):
        for size in (20, 17):
            assert torch.equal(function(X[:size], 3.0), 3 * X[:size])


def test_a_graph_without_a_launch_is_compiled() -> None:
    def graph_of(function: Any) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(function, concrete_args={"factor": 2.0})

    from assay.interpreter.launch import _eager_if_launching

    compile_or_not = _eager_if_launching(lambda self, graph, inputs: "compiled")
    assert compile_or_not(None, graph_of(lambda x, factor: x.sin() * factor), []) == "compiled"
    op = torch.ops.assay_launchers.scaled.default
    assert compile_or_not(None, graph_of(lambda x, factor: op(x, factor)), []) != "compiled"
