"""What `faithful` changes, and that it changes nothing else."""

import subprocess
import sys
import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from assay.interpreter import UnknownTriton, faithful, self_test, session
from assay.verify import examine
from tests.interpreter import triton_kernels as kernels

PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, plain, plain.InterpretedFunction)


def state() -> list[dict[str, object]]:
    owners = (*PATCHED, JITFunction, Autotuner, kernels, tl.extra.libdevice, tl.extra.cuda.libdevice)
    return [dict(vars(owner)) for owner in owners]


def normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    kernels.normalise[(1,)](x, y, x.numel(), eps, N=triton.next_power_of_2(x.numel()))
    return y


def test_all_self_tests_hold():
    """Every claim of the self-test is true inside `faithful`."""
    with faithful():
        assert {claim: reason for claim, reason in self_test.self_test().items() if reason} == {}


def test_self_tests_find_the_faults_of_the_plain_interpreter():
    """The same self-test fails in Triton's own interpreter: it can."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "assay.interpreter.self_test"],
        env={"TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for claim in ("float32 to bfloat16 rounds to nearest even", "bfloat16 dots", "float32 to e4m3 keeps NaN"):
        assert f'"{claim}": ""' not in done.stdout
        assert claim in done.stdout


def test_a_published_style_of_norm_runs():
    """A kernel that converts its float argument and imports rsqrt by name runs, and is right to an ulp."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with faithful():
        y = normalised(x, 1e-6)
    exact = x.double() / (x.double().square().mean() + 1e-6).sqrt()
    assert bool(((y.double() - exact).abs() <= 4 * 2.0**-24 * exact.abs() * 3).all())


def test_nothing_stays_patched():
    """After `faithful`, and after an error inside, each attribute of Triton and of the kernel's module is as before."""
    with faithful():
        normalised(torch.ones(4), 0.0)
    before = state()
    with faithful(), faithful():
        normalised(torch.ones(4), 0.0)
    with faithful(), pytest.raises(InterpreterError):
        kernels.fails_in_program_two[(4,)](torch.ones(1))
    assert state() == before


def test_outside_a_kernel_still_needs_a_compiler():
    """Outside of `faithful` a launch on a CPU fails as Triton lets it."""
    with pytest.raises(RuntimeError, match="active drivers"):
        normalised(torch.ones(4), 0.0)


def test_an_error_names_the_program():
    """What goes wrong inside a kernel is reported with the kernel and the program."""
    with faithful(), pytest.raises(InterpreterError, match=r"not here.*program \(2, 0, 0\) of fails_in_program_two"):
        kernels.fails_in_program_two[(4,)](torch.ones(1))


def test_a_grid_that_no_gpu_takes_is_refused():
    """More than 65,535 programs along the second axis raise, as the launch would on a GPU."""
    with faithful(), pytest.raises(ValueError, match="axis 1 has 65536 programs; a GPU takes at most 65535"):
        kernels.store_index[(1, 65536)](torch.empty(65536))


def test_every_configuration_of_an_autotuned_kernel_comes_up():
    """The configuration depends on the key alone, and over several keys each is chosen."""
    widths = []
    with faithful():
        for n in (*range(32), *range(32)):
            y = torch.zeros(1)
            kernels.which_config[(1,)](y, n)
            widths.append(int(y))
    assert set(widths) == {16, 32, 64}
    assert widths[:32] == widths[32:]


def test_a_global_that_changes_is_seen():
    """A kernel sees the present value of a constant of its module, not that of the first launch."""
    x, y = torch.ones(4), torch.empty(4)
    with faithful():
        normalised(x, 0.0)
        original = kernels.rsqrt
        try:
            kernels.rsqrt = tl.abs
            kernels.normalise[(1,)](x, y, 4, 3.0, N=4)
        finally:
            kernels.rsqrt = original
    assert y.tolist() == [4.0] * 4


def test_examine_interprets_by_itself():
    """A Triton kernel examined on a CPU runs in the faithful interpreter without being told."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = [normalised(row.contiguous(), 1e-6) for row in x.float()]
        return (torch.stack(rows) * weight.float()).to(x.dtype) if rows else torch.empty_like(x)

    verdict = examine(norm, "rmsnorm", dtype="bfloat16", shapes={"R": [1, 2], "N": [8, 33, 64]}, examples=10)
    assert verdict.passed, str(verdict)


def test_an_unknown_version_is_not_vouched_for(monkeypatch):
    """In another version of Triton a warning says how many self-tests hold, and which don't."""
    monkeypatch.setattr(triton, "__version__", "99.0")
    monkeypatch.setattr(self_test, "CHECKS", (*self_test.CHECKS[:2], self_test.Check("pigs fly", lambda: "they don't")))
    session._check_version.cache_clear()
    try:
        with pytest.warns(UnknownTriton, match=r"2 hold.*wrong: pigs fly \(they don't\)"), faithful():
            pass
    finally:
        session._check_version.cache_clear()


def test_a_known_version_is_vouched_for_in_silence():
    """In the installed version, which is known, nothing is said."""
    session._check_version.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with faithful():
            pass
