"""The same kernels get the same verdicts, to the bit, and goldens are the same, whatever surrounds them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from assay.runtime.sandbox import unavailable
from tests.verify.surrounded import results

ROOT = Path(__file__).parents[2]
PROGRAM = "import torch; {before}; from tests.verify.surrounded import results; print(results())"
META = "torch.set_default_device('meta')"
DOUBLE = "torch.set_default_dtype(torch.float64)"
STRICT = "torch.set_autocast_enabled('cpu', True), torch.use_deterministic_algorithms(True)"
INFERENCE = "torch.set_grad_enabled(False), torch.inference_mode().__enter__()"
NOWHERE = {"HOME": "/nowhere", "XDG_CACHE_HOME": "/nowhere", "TRITON_CACHE_DIR": "/nowhere"}
TURKISH = {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "2"}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONHASHSEED": "2"}
LOCKED = (
    "bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--ro-bind", "/", "/",
    "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp",
)  # fmt: skip
needs_sandbox = pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox: {unavailable()}")


@cache
def here() -> str:
    """What these tests' own process gives."""
    return results()


@pytest.mark.parametrize(
    ("before", "options", "variables", "wrapped"),
    [
        pytest.param(META, (), {}, (), id="default device"),
        pytest.param(DOUBLE, (), {}, (), id="default dtype"),
        pytest.param(STRICT, (), {}, (), id="autocast, deterministic"),
        pytest.param(INFERENCE, (), {}, (), id="inference"),
        pytest.param("0", ("-OO", "-W", "error"), {}, (), id="optimised, warnings are errors"),
        pytest.param("0", (), TURKISH | NOWHERE, (), id="turkish, no home, two threads"),
        pytest.param("0", (), ASCII, (), id="ascii"),
        pytest.param("0", (), {}, LOCKED, id="not root, read-only", marks=needs_sandbox),
    ],
)
def test_verdicts_and_goldens_are_the_same_bits(
    before: str, options: Sequence[str], variables: dict[str, str], wrapped: Sequence[str]
) -> None:
    command = [*wrapped, sys.executable, "-P", *options, "-c", PROGRAM.format(before=before)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == here()
