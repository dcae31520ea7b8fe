"""Shared by the scripts of this folder: a device or its rehearsal on the CPU, claims, and a section of docs/gpu.md."""

import argparse
import contextlib
import importlib.metadata
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
LOGS = ROOT / "docs" / "gpu"
LONGEST = 480  # seconds of a script
NOT_RUN = "Not yet run."
HOLDS = "holds "
REHEARSED = "h100"  # the device that a rehearsal emulates


@dataclass
class Part:
    """One script's run: its printed lines, and its failed claims."""

    rehearsal: bool
    lines: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        """Return the device of kernels: "cuda", or "cpu" in a rehearsal."""
        return "cpu" if self.rehearsal else "cuda"

    @property
    def key(self) -> str:
        """Return the GPU's row of configs/devices.toml: by name, else by capability and multiprocessors."""
        from assay.formats.devices import devices

        if self.rehearsal:
            return REHEARSED
        result = torch.cuda.get_device_properties(0)
        known = [each.cuda for each in devices().values() if each.cuda is not None]
        like = (result.major, result.minor, result.multi_processor_count)
        named = [each.key for each in known if each.name == result.name]
        alike = [each.key for each in known if (each.major, each.minor, each.multi_processor_count) == like]
        if not named and not alike:
            sys.exit(f"{result.name}: expected a device of configs/devices.toml; add its row")
        return (named or alike)[0]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, line: str) -> None:
        """Print a line and add it to the section."""
        print(line, flush=True)
        self.lines.append(line)

    def claim(self, what: str, holds: bool, detail: str = "") -> None:
        """Print whether a claim holds; the script fails if it doesn't."""
        self.say(f"{HOLDS if holds else 'FAILS '} {what}{f': {detail}' if detail else ''}")
        if not holds:
            self.failed.append(what)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run Triton kernels on the device inside, or interpreted in a rehearsal."""
        from assay.interpreter import faithful

        with faithful(device=self.key) if self.rehearsal else contextlib.nullcontext():
            yield


def main(name: str, body: Callable[..., None], options: dict[str, dict[str, Any]] | None = None) -> None:
    """Run a script's ``body(part, **options)`` on the GPU, or with ``--rehearse`` on the CPU; exit 1 if a claim fails.

    Only a run on a GPU writes the section ``name`` of docs/gpu.md.
    """
    parser = argparse.ArgumentParser(description=sys.modules[body.__module__].__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in small sizes; nothing is written down")
    for option, about in (options or {}).items():
        parser.add_argument(f"--{option}", **about)
    given = vars(parser.parse_args())
    part = Part(given.pop("rehearse"))
    if not part.rehearsal and not torch.cuda.is_available():
        sys.exit("expected a GPU of NVIDIA's, found none; --rehearse runs this on the CPU")
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST)
    try:
        body(part, **given)
    except Exception as error:
        part.claim("the script runs to its end", False, f"{type(error).__name__}: {error}".splitlines()[0])
    signal.alarm(0)
    held = sum(line.startswith(HOLDS) for line in part.lines)
    part.say(f"{held} claims hold, {len(part.failed)} fail; {part.seconds:.0f} s")
    if not part.rehearsal:
        command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]])
        write_down(name, f"{circumstances()}: `{command}`", part.lines)
    sys.exit(1 if part.failed else 0)


def circumstances() -> str:
    """Return date, device and versions of a run."""
    versions = [f"{each} {importlib.metadata.version(each)}" for each in ("torch", "triton", "numpy")]
    device = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no GPU"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return ", ".join([day, device, f"Python {platform.python_version()}", *versions])


def write_down(name: str, head: str, lines: list[str]) -> None:
    """Write every line to docs/gpu/NAME.log, and the section of docs/gpu.md."""
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"{name}.log").write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), name, section(name, head, lines)), encoding="utf-8")


def section(name: str, head: str, lines: list[str]) -> str:
    """Return a run's section of docs/gpu.md: its head, and the printed lines; claims that hold stand in the log."""
    shown = [line for line in lines if not line.startswith(HOLDS)]
    return "\n".join([f"{head} ([every line](gpu/{name}.log))", "", "```", *shown, "```"])


def written(page: str, name: str, content: str) -> str:
    """Return the page with the section of that name replaced. Raises ValueError if the page has none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"docs/gpu.md: expected a section between {begin} and {end}, found none")
    return pattern.sub(lambda _: f"{begin}\n{content}\n{end}", page)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compare elementwise; all NaN are equal."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    equal = a.view(kinds[a.dtype.itemsize]) == b.view(kinds[b.dtype.itemsize])
    if a.dtype.is_floating_point:
        equal = equal | (a.double().isnan() & b.double().isnan())
    return equal


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the script took longer than {LONGEST} s")
