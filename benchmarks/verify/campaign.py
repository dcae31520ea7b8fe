"""A campaign of thousands of examinations on Ray, a worker of which is killed, and the same in processes here.

    python -P benchmarks/verify/campaign.py [EXAMINATIONS] [WORKERS]

PyTorch's kernels of five ops in three dtypes are examined under as many seeds as make EXAMINATIONS (2,000 where left
out), each with quick effort and without fuzzed cases. On Ray, once a quarter is done, a worker process is killed with
SIGKILL, and at half the command itself is ended and begun again. Then the same campaign runs in local processes, in two
parts. All verdicts must be there and have the same content, figure by figure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

KERNELS = {
    "softmax": "lambda x: torch.softmax(x, -1)",
    "log_softmax": "lambda x: torch.log_softmax(x, -1)",
    "silu": "lambda x: torch.nn.functional.silu(x)",
    "gelu": "lambda x: torch.nn.functional.gelu(x)",
    "gemm": "lambda a, b: torch.mm(a, b)",
}
DTYPES = ("float32", "bfloat16", "float16")
SIZES = "{ N = [1, 7, 64] }"  # small, so that thousands are a matter of minutes


def campaign(path: Path, examinations: int) -> int:
    """Write a table of about so many examinations; how many it has."""
    seeds = -(-examinations // (len(KERNELS) * len(DTYPES)))
    with path.open("w", encoding="utf-8") as file:
        for op, call in KERNELS.items():
            file.write(
                f'[[kernel]]\nname = "{op}"\ntarget = "torch:{call}"\nspec = "{op}"\nshapes = {SIZES}\n'
                f"dtypes = {list(DTYPES)}\nexamples = 0\nseeds = {list(range(seeds))}\n"
            )
    return seeds * len(KERNELS) * len(DTYPES)


def start(table: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """`assay verify` of the campaign."""
    command = [sys.executable, "-P", "-m", "assay.cli.main", "verify", str(table), "--out", str(out), *options]
    with (out.parent / f"{out.name}.log").open("ab") as log:
        return subprocess.Popen([*command, "--effort", "quick"], stdout=log, stderr=log)


def done(out: Path) -> int:
    """Verdicts that are kept."""
    return len(list(out.glob("*.json")))


def content(path: Path) -> dict[str, Any]:
    """A verdict without what hangs on the moment: how long it took, and when."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found.pop("seconds")
    found["about"].pop("date")
    return found


def wait_for(out: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Until so many verdicts are there, or the process has ended."""
    while done(out) < count and process.poll() is None:
        time.sleep(0.2)


def kill_a_worker() -> int:
    """SIGKILL to a process of Ray's that runs a task; its number."""
    while True:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and (entry / "cmdline").exists():
                try:
                    words = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if words.startswith(b"ray::_work"):
                    os.kill(int(entry.name), signal.SIGKILL)
                    return int(entry.name)
        time.sleep(0.05)


def main(examinations: int = 2000, workers: int = 2) -> None:
    """Run both, and compare. Exits with 1 where a verdict is missing or another."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        table, ray, local = folder / "campaign.toml", folder / "ray", folder / "local"
        count = campaign(table, examinations)
        on_ray = ("--engine", "ray", "--jobs", str(workers))
        began = time.monotonic()
        process = start(table, ray, *on_ray)
        wait_for(ray, count // 4, process)
        print(f"{done(ray)} of {count} done on Ray; worker {kill_a_worker()} killed", flush=True)
        wait_for(ray, count // 2, process)
        process.send_signal(signal.SIGTERM)
        process.wait()
        print(f"{done(ray)} of {count} done on Ray; the command ended and begun again", flush=True)
        status = start(table, ray, *on_ray).wait()
        print(
            f"{done(ray)} of {count} done on Ray in {time.monotonic() - began:.0f} s, exit status {status}", flush=True
        )
        began = time.monotonic()
        for part in ("1/2", "2/2"):
            status = start(table, local, "--part", part, "--jobs", str(workers)).wait()
        print(
            f"{done(local)} of {count} done locally in {time.monotonic() - began:.0f} s, exit status {status}",
            flush=True,
        )
        verdicts = [{path.name: content(path) for path in each.glob("*.json")} for each in (ray, local)]
        other = [name for name, verdict in verdicts[1].items() if verdicts[0].get(name) != verdict]
        same = len(verdicts[1]) - len(other)
        for name in other:
            there = verdicts[0].get(name, {})
            parts = [part for part, value in verdicts[1][name].items() if there.get(part) != value]
            print(f"{name}: {', '.join(parts)} differ")
            for part in parts:
                print(f"  {part}: on Ray {there.get(part)!r:.400}, here {verdicts[1][name][part]!r:.400}")
        print(f"{same} of {count} verdicts are the same", flush=True)
        sys.exit(int(same != count or len(verdicts[0]) != count))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
