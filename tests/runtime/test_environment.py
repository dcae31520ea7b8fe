"""The numeric environment: goldens don't depend on it, and a kernel leaves none of it behind."""

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from assay.golden import evaluate
from assay.runtime.environment import (
    SETTINGS,
    STANDARD,
    changes,
    environment,
    generators_kept,
    in_environment,
    put,
    seed_generators,
    standard_environment,
    with_changes,
)
from assay.verify import examine
from assay.verify.errors import SettingError
from assay.verify.examination.repro import run_line

OTHERS: dict[str, Any] = {
    "flush-to-zero (torch.set_flush_denormal)": True,
    "torch's default dtype": torch.float64,
    "torch's number of threads": 3,
    "torch's gradient mode": False,
    "torch.use_deterministic_algorithms": (True, True),
    "autocast on the CPU": True,
    "torch.backends.cuda.matmul.fp32_precision": "tf32",
    "torch.backends.mkldnn.matmul.fp32_precision": "bf16",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "torch.backends.cuda.matmul.allow_fp16_accumulation": True,
    "numpy's error state": dict.fromkeys(("divide", "over", "under", "invalid"), "raise"),
}
_DEFAULTS = {setting.name: setting.standard for setting in SETTINGS if setting.standard is not None}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = environment()
    yield
    put(before)


@pytest.mark.parametrize("name", OTHERS)
def test_a_setting_is_seen_put_back_and_named(name: str) -> None:
    before = environment()
    with in_environment(before) as left:
        next(setting for setting in SETTINGS if setting.name == name).write(OTHERS[name])
    assert environment() == before
    assert [words.partition(" at ")[0] for words in left] == [name]


def test_nothing_changed_is_nothing_told() -> None:
    with in_environment(environment()) as left:
        torch.ones(3).sum()
    assert left == []


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 2


class Triples(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * 3


@pytest.mark.parametrize("block", [False, True], ids=["alone", "in a device's block"])
def test_modes_that_are_left_on_end_and_are_named(block: bool) -> None:
    """All of them, and none of the caller's; the default device that was changed with them comes back."""
    with Doubles(), torch.device("meta") if block else nullcontext():
        before = torch.ones(1, device="cpu").item()
        with in_environment(environment()) as left:
            for mode in (Triples(), Doubles(), Triples()):
                mode.__enter__()
        assert torch.get_default_device().type == ("meta" if block else "cpu")
        assert torch.ones(1, device="cpu").item() == before
    assert torch.ones(1).item() == 1.0
    assert left == [f"torch's mode {name} on (it was off)" for name in ("Doubles", "Triples", "Triples")]


@pytest.mark.parametrize("name", OTHERS)
def test_the_standard_environment_undoes_a_setting_for_its_length(name: str) -> None:
    place = [setting.name for setting in SETTINGS].index(name)
    SETTINGS[place].write(OTHERS[name])
    with standard_environment():
        assert STANDARD[place] is None or SETTINGS[place].read() == STANDARD[place]
    assert SETTINGS[place].read() == OTHERS[name]


@pytest.mark.parametrize("block", [False, True], ids=["set", "block"])
def test_the_callers_default_device_comes_back_in_a_call_and_after_it(block: bool) -> None:
    """`torch.set_default_device` in a block would end the block."""
    if not block:
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if block else nullcontext():
            wanted = environment()
            for _ in range(2):
                with standard_environment():
                    assert torch.ones(1).device.type == "cpu"
                    with in_environment(wanted) as left:
                        assert torch.ones(1).device.type == "meta"
                        torch.set_default_dtype(torch.float64)
                    assert len(left) == 1
                    assert torch.ones(1).device.type == "cpu"
                assert torch.ones(1).device.type == torch.get_default_device().type == "meta"
    finally:
        if not block:
            torch.set_default_device(None)
    assert torch.ones(1).device.type == torch.get_default_device().type == "cpu"


def test_a_golden_of_subnormals_is_right_under_flush_to_zero() -> None:
    tensors = torch.tensor([[1e-40]]), torch.tensor([[1.0]])
    plain = evaluate("gemm", *tensors)
    put((True, *environment()[1:]))
    flushed = evaluate("gemm", *tensors)
    put((False, *environment()[1:]))
    assert plain.value.item() == flushed.value.item() == tensors[0].double().item() > 0
    assert flushed.radius.item() == plain.radius.item()


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def test_an_examination_under_flush_to_zero_judges_by_the_right_goldens() -> None:
    torch.set_num_threads(1)  # the flag is a thread's own
    put((True, *environment()[1:]))
    flushing = examine(torch.rsqrt, "rsqrt", dtype="float32", effort="quick", examples=20, shrinking=False, strict=True)
    put((False, *environment()[1:]))
    keeping = examine(torch.rsqrt, "rsqrt", dtype="float32", effort="quick", examples=20, shrinking=False, strict=True)
    assert (flushing.outcome, keeping.outcome) == ("FAIL", "PASS")


def test_a_repro_line_says_and_restores_the_environment() -> None:
    """What fails under flush-to-zero alone fails again from its line, and passes where the line doesn't say it."""
    torch.set_num_threads(1)
    put((True, *environment()[1:]))
    found = examine(torch.rsqrt, "rsqrt", dtype="float32", effort="quick", examples=20)
    put((False, *environment()[1:]))
    assert '"environment":{"flush-to-zero (torch.set_flush_denormal)":true},' in found.repro
    assert run_line(found.repro, "torch:rsqrt").failure is not None
    assert environment()[0] is False
    other = re.sub(r'"environment":\{.*?\},', "", found.repro)
    assert run_line(other, "torch:rsqrt").failure is None


@pytest.mark.parametrize("name", [name for name in OTHERS if name in _DEFAULTS])
def test_what_is_not_standard_survives_json(name: str) -> None:
    put(tuple(OTHERS[name] if setting.name == name else setting.standard for setting in SETTINGS))
    said = json.loads(json.dumps(changes()))
    assert set(said) == {name}
    assert with_changes(said) == environment()


@pytest.mark.parametrize(
    ("said", "words"),
    [({"flush": True}, "unknown numeric setting 'flush'"), ({"torch's default dtype": "float31"}, "got 'float31'")],
)
def test_an_environment_that_is_none_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        with_changes(said)


@pytest.mark.parametrize(
    ("change", "words", "isolate"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype at torch.float64", False),
        (lambda: torch.set_flush_denormal(True), "flush-to-zero", False),
        (lambda: np.seterr(all="raise"), "numpy's error state", False),
        (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype at torch.float64", True),
    ],
)
def test_what_a_kernel_leaves_changed_is_told_in_words(change: Callable[[], Any], words: str, isolate: bool) -> None:
    """A kernel that computes the right thing passes, and what it left changed is in the verdict and its report."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = _softmax(x)
        change()
        return y

    before = environment()
    verdict = examine(kernel, "softmax", dtype="bfloat16", effort="quick", examples=5, isolate=isolate)
    assert environment() == before
    assert verdict.passed, str(verdict)
    assert len(verdict.left_changed) == 1
    assert verdict.left_changed[0].startswith(words)
    assert words in str(verdict)


def _noisy(x: torch.Tensor) -> torch.Tensor:
    chance = torch.rand(()).item() + np.random.rand() + random.random()
    return _softmax(x) * (1.25 if chance < 0.8 else 1.0)


def test_a_stochastic_kernel_is_judged_by_the_seed_alone() -> None:
    """A kernel that now and then goes wrong does so in the same case, whatever was drawn before the examination."""
    found = []
    for ambient in (1, 2, 3):
        seed_generators(ambient)
        found.append(examine(_noisy, "softmax", dtype="bfloat16", effort="quick", examples=10, shrinking=False))
    assert len({(verdict.outcome, verdict.cases, verdict.repro) for verdict in found}) == 1
    assert found[0].outcome == "FAIL"


def test_an_examination_draws_nothing_from_the_callers_generators() -> None:
    drawn = []
    for examined in (False, True):
        seed_generators(5)
        if examined:
            with generators_kept():
                _noisy(torch.zeros(1, 2))
            examine(_noisy, "softmax", dtype="bfloat16", effort="quick", examples=1, shrinking=False)
        drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("lost", ["get_rng_state", "set_rng_state"], ids=["before", "inside"])
def test_a_lost_device_keeps_no_generator_and_the_others_stay(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """A device that is there gets its state back."""
    written: list[Any] = []

    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("assay.runtime.environment._devices", lambda: range(1))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: f"state of {device}")
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: written.append(given))
    with generators_kept():
        pass
    assert written == [("state of 0", 0)]
    monkeypatch.setattr(torch.cuda, lost, fails)
    drawn = []
    for inside in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        if inside:
            with generators_kept():
                torch.rand(()), random.random()
        drawn.append((torch.rand(()).item(), random.random()))
    assert drawn[0] == drawn[1]
