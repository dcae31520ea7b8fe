"""Shared by the scripts of this folder: a device or its rehearsal on the CPU, claims, steps, and a section of
docs/gpu.md."""

import argparse
import contextlib
import fcntl
import importlib.metadata
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from assay.runtime.pool import core_count
from assay.runtime.results import ResultStore, result_key, versions_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu.md"
LOGS = ROOT / "docs" / "gpu"
OUT = ROOT / "build" / "gpu"  # what a run has finished
LONGEST = 480.0  # seconds of a script
NOT_RUN = "Not yet run."
HOLDS, FAILS = "holds ", "FAILS "
REHEARSED = "h100"  # the device that a rehearsal emulates


@dataclass
class Part:
    """One script's run: its printed lines, among them failed claims, its tables, and the steps that it need not repeat.

    ``out`` is the folder of finished steps, ``limit`` the seconds that the part may take, ``workers`` the number of
    processes that it may start.
    """

    rehearsal: bool
    name: str = "part"
    out: Path = OUT
    anew: bool = False
    limit: float = LONGEST
    workers: int = 1
    lines: list[str] = field(default_factory=list)
    listed: set[str] = field(default_factory=set)
    tables: list[str] = field(default_factory=list)
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

    @property
    def until(self) -> float:
        """Return the moment of `time.monotonic` after which nothing long may begin."""
        return self.began + 0.9 * self.limit

    @property
    def failed(self) -> list[str]:
        """Return the claims that fail."""
        return [line.removeprefix(FAILS).strip() for line in self.lines if line.startswith(FAILS)]

    def say(self, line: str) -> None:
        """Print a line and add it to the section."""
        print(line, flush=True)
        self.lines.append(line)

    def claim(self, what: str, holds: bool, detail: str = "") -> None:
        """Print whether a claim holds; the script fails if it doesn't."""
        self.say(f"{HOLDS if holds else FAILS} {what}{f': {detail}' if detail else ''}")

    def say_listed(self, line: str) -> None:
        """Print a line that a table of the section has, in ``tables``."""
        self.say(line)
        self.listed.add(line)

    def step(self, name: str, body: Callable[[], None]) -> None:
        """Run a step; or print the lines of an earlier run that finished it, with the same sources, versions and
        device."""
        lines = self.kept(name)
        if lines is not None:
            for line in lines:
                self.say(line)
            return
        before = len(self.lines)
        body()
        self.keep(name, self.lines[before:])

    def kept(self, name: str) -> Any | None:
        """Return what an earlier run kept by this name, with the same sources, versions and device; or None."""
        return None if self.anew else ResultStore(self.out).get(self._file(name), self._key(name))

    def keep(self, name: str, answer: Any) -> None:
        """Keep plain data for a later run."""
        ResultStore(self.out).put(self._file(name), self._key(name), answer, versions_of(*self._modules))

    def _file(self, name: str) -> str:
        words = re.sub(r"[^A-Za-z0-9]+", "-", name)[:60]
        return f"{self.name}/{words}-{sha256(name.encode()).hexdigest()[:6]}"

    def _key(self, name: str) -> str:
        device = "rehearsal" if self.rehearsal else torch.cuda.get_device_name(0)
        target = f"benchmarks.gpu.{self.name}:body"
        return result_key([self.name, name], *self._modules, targets=[target], device=device)

    @cached_property
    def _modules(self) -> list[str]:
        """Return the modules of assay that the part answers by: those loaded when its first step begins."""
        loaded = [(name, module) for name, module in sys.modules.items() if name.startswith("assay.")]
        return sorted(name for name, module in loaded if module.__spec__ and module.__spec__.origin)  # with a file

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
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in small sizes; docs/gpu.md stays")
    parser.add_argument("--anew", action="store_true", help="repeat what an earlier run has finished")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of what is finished (default: build/gpu)")
    parser.add_argument("--seconds", type=float, default=LONGEST, help="the longest that this may take")
    parser.add_argument("--workers", type=int, default=core_count(), help="processes at once, where there are several")
    for option, about in (options or {}).items():
        parser.add_argument(f"--{option}", **about)
    given = vars(parser.parse_args())
    shared = (given.pop(each) for each in ("out", "anew", "seconds", "workers"))
    part = Part(given.pop("rehearse"), name, *shared)
    if not part.rehearsal and not torch.cuda.is_available():
        sys.exit("expected a GPU of NVIDIA's, found none; --rehearse runs this on the CPU")
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, part.limit)
    try:
        body(part, **given)
    except Exception as error:
        part.claim("the script runs to its end", False, f"{type(error).__name__}: {error}".splitlines()[0])
    signal.setitimer(signal.ITIMER_REAL, 0)
    held = sum(line.startswith(HOLDS) for line in part.lines)
    part.say(f"{held} claims hold, {len(part.failed)} fail; {part.seconds:.0f} s")
    if not (part.rehearsal or given.get("warm") or given.get("few")):  # a part of a part would replace the whole
        command = " ".join(["python", str(Path(sys.argv[0]).resolve().relative_to(ROOT))])
        write_down(part, f"{circumstances()}: `{command}`")
    sys.exit(1 if part.failed else 0)


def circumstances() -> str:
    """Return date, device and versions of a run."""
    versions = [f"{each} {importlib.metadata.version(each)}" for each in ("torch", "triton", "numpy")]
    device = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no GPU"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return ", ".join([day, device, f"Python {platform.python_version()}", *versions])


def write_down(part: Part, head: str) -> None:
    """Write every line to docs/gpu/NAME.log, and the section of docs/gpu.md; other parts may do so meanwhile."""
    LOGS.mkdir(exist_ok=True)
    (LOGS / f"{part.name}.log").write_text("\n".join([head, *part.lines, ""]), encoding="utf-8")
    with PAGE.open("r+", encoding="utf-8") as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        text = written(page.read(), part.name, section(part, head))
        page.seek(0)
        page.truncate()
        page.write(text)


def section(part: Part, head: str) -> str:
    """Return a run's section of docs/gpu.md: head, tables, and the other lines but for claims that hold."""
    shown = [line for line in part.lines if not line.startswith(HOLDS) and line not in part.listed]
    parts = [f"{head} ([every line](gpu/{part.name}.log))", *part.tables, "\n".join(["```", *shown, "```"])]
    return "\n\n".join(parts)


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


def _too_long(number: int, _: object) -> None:
    if number == signal.SIGTERM:
        raise TimeoutError("the script was stopped; the same command goes on from what it had finished")
    raise TimeoutError("the time was up; the same command goes on from what it had finished")
