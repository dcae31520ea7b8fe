"""The device, its driver and tools, and `assay doctor` there."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.backends.nvidia import compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from assay.runtime.pool import core_count
from benchmarks.gpu.part import Part, main

_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
_SELF_TESTS = 4  # of `assay doctor`
_HOPPER = 90  # its compute capability times ten


def body(part: Part) -> None:
    """Report device, versions and compilers; claim that the device is known and the doctor's tests hold."""
    part.say(f"  {platform.machine()}, {core_count()} cores; torch {torch.__version__}, triton {triton.__version__}")
    if not part.rehearsal:
        about = torch.cuda.get_device_properties(0)
        memory = f"{about.total_memory / 2**30:.1f} GiB, {about.multi_processor_count} multiprocessors"
        part.say(f"  {about.name}, compute capability {about.major}.{about.minor}, {memory}")
        part.say(f"  CUDA {torch.version.cuda}, driver {_first_line(_DRIVER)}")
    for name, path in compilers().items():
        part.say(f"  {name}: {version(path)}")
    sanitizer = shutil.which("compute-sanitizer")
    part.say(f"  compute-sanitizer: {_first_line([sanitizer, '--version']) if sanitizer else 'not installed'}")
    part.claim("configs/devices.toml has the device", bool(part.key), part.key)
    part.step("doctor", lambda: _doctor(part))


def _doctor(part: Part) -> None:
    command = [sys.executable, "-P", "-m", "assay.cli.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    tests = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("self-test")]
    for words in tests:
        part.say(f"  {words}")
    part.claim("the self-tests of assay doctor hold", done.returncode == 0 and len(tests) >= _SELF_TESTS)


def compilers() -> dict[str, Path]:
    """Return the assemblers that come with Triton, by name."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return {path.name: path for path in sorted(folder.glob("ptxas*"))}


def shipped() -> Path:
    """Return the assembler that Triton runs for Hopper where no variable names another."""
    own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TRITON_PTXAS")}
    try:
        return Path(compiler.get_ptxas(_HOPPER).path)
    finally:
        os.environ.update(own)


def version(path: Path) -> str:
    """Return a ptxas' version, such as "12.8.93"; the reason where it can't be run."""
    line = _first_line([str(path), "--version"], mark="release")
    return line.rpartition(", V")[2] or line


def _first_line(command: list[str], mark: str = "") -> str:
    """Return the first line that a program prints, or the first with ``mark``."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run ({error})"
    return next((line.strip() for line in printed.splitlines() if mark in line and line.strip()), "no answer")


if __name__ == "__main__":
    main("device", body)
