"""Run the checks that need a GPU: `./dev gpu [quick | all | PART...]`, each part a process of its own.

`quick` takes at most 2 minutes, `all`, and parts by name, 8. Parts run side by side, and then alone the one that
measures times. What a part has finished is in the folder of `--out`, and a later run with the same sources, versions
and device doesn't repeat it; so a run that was cut off goes on.

A run on a GPU writes the parts' sections of docs/gpu.md; without a GPU, or with `--rehearse`, each part runs completely
on the CPU in small sizes and docs/gpu.md stays. Exits 1 if a claim of a part fails, or a part was cut off.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from assay.runtime.pool import core_count

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "build" / "gpu"
QUICK = ("device", "accumulators", "interpreter_bits", "random_tensors", "kernels", "crashes")
PARTS = (*QUICK, "goldens", "pytorch", "model_audit", "libraries")
ALONE = ("libraries",)  # times: nothing runs beside them
POOLS = ("kernels", "crashes", "pytorch")  # parts that start processes of their own
SECONDS = {"quick": 120.0, "all": 480.0}
_FOR_ALONE = 60.0  # seconds that are kept for each part that runs alone
_GRACE = 10.0  # seconds between a part's own end and the signal that ends it, and between two signals
_TICK = 0.05  # seconds between two looks at processes
_SUMMARY = " claims hold, "  # of a part's last line
_WARM = " (compiling)"  # of the name of an earlier, untimed run of a part that measures times
_SHORT = {"kernels": ["--few"], "crashes": ["--failing"]}  # what `quick` tells a part


@dataclass
class Running:
    """A process in progress, whose output goes to the file ``log``; it is ended at ``until``."""

    name: str
    log: Path
    until: float
    process: subprocess.Popen[bytes] = field(init=False)
    stopped: bool = False

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> Running:
        """Start the process, in a group of its own."""
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        return self

    def stop(self) -> None:
        """End the process and its descendants, if it is still running."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.process.poll() is None:
                self.stopped = True
                os.killpg(self.process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_GRACE)

    @property
    def last_line(self) -> str:
        """Return the last line of the output."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def side_by_side(
    names: Sequence[str],
    start: Callable[[str], Running],
    ended: Callable[[Running], None],
    until: float,
    most: int,
) -> None:
    """Run processes, ``most`` at once, and call ``ended`` with each; at the moment ``until`` those left are stopped."""
    waiting, busy = list(names), list[Running]()
    try:
        while busy or (waiting and time.monotonic() < until):
            while waiting and len(busy) < most and time.monotonic() < until:
                busy.append(start(waiting.pop(0)))
            time.sleep(_TICK)
            for running in list(busy):
                if running.process.poll() is None and time.monotonic() < min(running.until, until):
                    continue
                running.stop()
                busy.remove(running)
                ended(running)
    finally:
        for running in busy:
            running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="./dev gpu", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", help=f"quick, all (the default), or of {', '.join(PARTS)}")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU even where there is a GPU")
    parser.add_argument("--anew", action="store_true", help="repeat what an earlier run has finished")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs and of what is finished")
    parser.add_argument("--seconds", type=float, help="the longest that all this may take")
    parser.add_argument("--ptxas", type=Path, help="a newer ptxas for `crashes` (default: TRITON_PTXAS_PATH)")
    given = parser.parse_args()
    for name in given.part:
        if name not in (*PARTS, *SECONDS):
            parser.error(f"unknown part {name!r}; expected quick, all, or of {', '.join(PARTS)}")
    quick = "quick" in given.part
    names = [name for name in PARTS if name in given.part or "all" in given.part or not given.part]
    names = [*dict.fromkeys([*(QUICK if quick else ()), *names])]
    import torch

    rehearse = given.rehearse or not torch.cuda.is_available()
    if rehearse:
        print("a rehearsal on the CPU: it shows that the scripts run, nothing about a GPU", flush=True)
    seconds = given.seconds or SECONDS["quick" if quick and set(names) == set(QUICK) else "all"]
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    alone = [name for name in names if name in ALONE]
    together = [name for name in names if name not in ALONE] + [f"{name}{_WARM}" for name in alone]
    names = [*together, *alone]
    cores = core_count()
    pools = [name for name in together if name in POOLS]
    share = max(1, cores // max(1, len(pools)))

    end = time.monotonic() + seconds - _GRACE
    together_until = end - _FOR_ALONE * len(alone)
    parts: list[Running] = []

    def start(name: str) -> Running:
        until = together_until if name in together else end
        options = [f"--out={out}", f"--seconds={max(until - time.monotonic(), 1):.0f}", f"--workers={share}"]
        options += ["--rehearse"] * rehearse + ["--anew"] * given.anew
        options += _SHORT.get(name, []) if quick else []
        options += [f"--ptxas={given.ptxas}"] if given.ptxas and name == "crashes" else []
        options += ["--warm"] * name.endswith(_WARM)
        threads = "1" if name in together else str(min(cores, 8))
        environment = {"TRITON_CACHE_DIR": str(out / "triton"), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        command = [sys.executable, "-P", str(HERE / f"{name.removesuffix(_WARM)}.py"), *options]
        running = Running(name, out / f"{name.replace(_WARM, '-compiling')}.log", until + _GRACE)
        return running.start(command, environment | os.environ | {"PYTHONUNBUFFERED": "1"})

    def ended(running: Running) -> None:
        parts.append(running)
        print(f"{_result(running)} ({running.log})", flush=True)
        (out / "summary.txt").write_text(_summary(names, parts), encoding="utf-8")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the parts are stopped too
    side_by_side(together, start, ended, together_until + _GRACE, cores)
    side_by_side(alone, start, ended, end + _GRACE, 1)
    print(f"\n{_summary(names, parts)}", flush=True)
    sys.exit(1 if len(parts) < len(names) or any(part.process.returncode for part in parts) else 0)


def _summary(names: Sequence[str], parts: Sequence[Running]) -> str:
    """Return a line for each part, and one of the parts that failed."""
    by_name = {part.name: part for part in parts}
    lines = [_result(by_name[name]) if name in by_name else f"{name}: not ended" for name in names]
    failed = [name for name in names if name not in by_name or by_name[name].process.returncode]
    return "\n".join([*lines, f"parts that failed or were cut off: {', '.join(failed) or 'none'}", ""])


def _result(part: Running) -> str:
    last = part.last_line
    return f"{part.name}: {last if _SUMMARY in last else f'cut off (status {part.process.returncode}): {last}'}"


if __name__ == "__main__":
    main()
