"""What `faithful` changes, and that it changes nothing else."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as plain
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from assay.interpreter import UnknownTriton, faithful, lasting, self_test, session
from assay.interpreter.replacing import Shared
from assay.kernels.triton.softmax import softmax
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
    with faithful():
        assert {claim: reason for claim, reason in self_test.self_test().items() if reason} == {}


def test_self_tests_find_the_faults_of_the_plain_interpreter():
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
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with faithful():
        y = normalised(x, 1e-6)
    exact = x.double() / (x.double().square().mean() + 1e-6).sqrt()
    assert bool(((y.double() - exact).abs() <= 4 * 2.0**-24 * exact.abs() * 3).all())


def test_nothing_stays_patched():
    with faithful():
        normalised(torch.ones(4), 0.0)
    before = state()
    with faithful(), faithful():
        normalised(torch.ones(4), 0.0)
    with faithful(), pytest.raises(InterpreterError):
        kernels.fails_in_program_two[(4,)](torch.ones(1))
    assert state() == before


def test_outside_a_kernel_still_needs_a_compiler():
    with pytest.raises(RuntimeError, match="active drivers"):
        normalised(torch.ones(4), 0.0)


def test_an_error_names_the_program():
    with faithful(), pytest.raises(InterpreterError, match=r"not here.*program \(2, 0, 0\) of fails_in_program_two"):
        kernels.fails_in_program_two[(4,)](torch.ones(1))


def test_a_grid_that_no_gpu_takes_is_refused():
    with faithful(), pytest.raises(ValueError, match="axis 1 has 65536 programs; a GPU takes at most 65535"):
        kernels.store_index[(1, 65536)](torch.empty(65536))


def test_every_configuration_of_an_autotuned_kernel_comes_up():
    widths = []
    with faithful():
        for n in (*range(32), *range(32)):
            y = torch.zeros(1)
            kernels.which_config[(1,)](y, n)
            widths.append(int(y))
    assert set(widths) == {16, 32, 64}
    assert widths[:32] == widths[32:]


def test_a_global_that_changes_is_seen():
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
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = [normalised(row.contiguous(), 1e-6) for row in x.float()]
        return (torch.stack(rows) * weight.float()).to(x.dtype) if rows else torch.empty_like(x)

    verdict = examine(norm, "rmsnorm", dtype="bfloat16", shapes={"R": [1, 2], "N": [8, 33, 64]}, examples=10)
    assert verdict.passed, str(verdict)


def test_an_unknown_version_is_not_vouched_for(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "99.0")
    monkeypatch.setattr(self_test, "CHECKS", (*self_test.CHECKS[:2], self_test.Check("pigs fly", lambda: "they don't")))
    session._check_version.cache_clear()
    try:
        with pytest.warns(UnknownTriton, match=r"2 hold.*wrong: pigs fly \(they don't\)"), faithful():
            pass
    finally:
        session._check_version.cache_clear()


def test_a_known_version_is_vouched_for_in_silence():
    session._check_version.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with faithful():
            pass


def members() -> dict[str, object]:
    """Those of Triton's tensors, as they are now."""
    return {name: value for name, value in vars(tl.tensor).items() if name != "__annotations__"}


def test_what_is_suspended_where_nothing_holds_stays_as_it_was() -> None:
    owner = SimpleNamespace(name="own")
    shared = Shared(lambda: [(owner, "name", "ours")])
    with shared.suspended():
        assert owner.name == "own"
    assert owner.name == "own"
    with shared:
        with shared.suspended():
            assert owner.name == "own"
        assert owner.name == "ours"
    assert owner.name == "own"


def test_lasting_changes_hold_from_their_first_use_to_the_end() -> None:
    owner = SimpleNamespace(lasts="own", ends="own")
    lasts = Shared(lambda: [(owner, "lasts", "ours")], lasting=True)
    ends = Shared(lambda: [(owner, "ends", "ours")])
    with lasting():
        assert owner.lasts == "own"
        with lasting(), lasts, ends:
            assert (owner.lasts, owner.ends) == ("ours", "ours")
        assert (owner.lasts, owner.ends) == ("ours", "own")
        with lasts.suspended():
            assert owner.lasts == "own"
        assert owner.lasts == "ours"
    assert owner.lasts == "own"
    with lasts:
        assert owner.lasts == "ours"
    assert owner.lasts == "own"


def test_an_examination_leaves_the_language_as_it_was() -> None:
    """Triton's language acts on arrays between two calls of an examined kernel, and no longer than that."""
    before, seen = members(), []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        seen.append(members() == before)
        return softmax(x)

    assert examine(kernel, "softmax", dtype="float32", effort="quick", examples=0).passed
    assert seen[0]
    assert not any(seen[1:])
    assert members() == before
    with faithful():
        assert members() == before


def test_blocks_of_one_shape_and_of_others_are_told_apart() -> None:
    early = tl.block_type(tl.float32, [4, 1])
    x = torch.ones(2, 3)
    with lasting(), faithful():
        softmax(x)
        late = tl.block_type(tl.float32, [tl.constexpr(4), 1])
        assert late == early
        assert early == late
        assert late.with_element_ty(tl.int32).with_element_ty(tl.float32) == early
        assert late.with_element_ty(tl.int32) != late
        assert tl.block_type(tl.float32, [1, 4]) != late
        assert tl.float32 == tl.constexpr(tl.float32)
        assert tl.float32 != tl.float16
        assert tl.float32 != tl.pointer_type(tl.float32)
