"""How the gate of `assay bench` answers on this machine: records of one version, and of one with a planted slowdown.

    python -P benchmarks/verify/bench_gate.py [RECORDS] [PLANTED]

A softmax of 1,024 rows is benched RECORDS times (21 where left out), each record being compared with the one before,
and then PLANTED times (5) each with 3 % and with 10 % of its rows computed twice, each compared with the last of those.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

KERNEL = """
import torch

def softmax(x):
    rows = {again} * len(x) // 100
    if rows:
        torch.softmax(x[:rows], -1)
    return torch.softmax(x, -1)
"""
SIZES = ["--shape", "R=1024,N=4096", "--dtype", "float32", "--seconds", "0.3", "--against", "none", "--no-compiled"]


def bench(folder: Path, again: int, before: Path | None) -> tuple[str, float, Path]:
    """One record of the kernel, and what the gate says of it; its answer, the change, and the record's file."""
    (folder / "rows.py").write_text(KERNEL.format(again=again), encoding="utf-8")
    name = folder / f"{time.time_ns()}.json"
    command = [sys.executable, "-P", "-m", "assay.cli.main", "bench", "rows:softmax", "--spec", "softmax", *SIZES]
    command += ["--json", "--save", str(name), *(["--compare", str(before)] if before else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    changes = json.loads(done.stdout)["changes"]
    return (changes[0]["answer"], changes[0]["change"], name) if changes else ("", 0.0, name)


def main(records: int = 21, planted: int = 5) -> None:
    """Print what the gate says of each pair, and how often it says what."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, last = Path(temporary), None
        began = time.monotonic()
        for again, count in ((0, records), (3, planted), (10, planted)):
            told: Counter[str] = Counter()
            changes = []
            for _ in range(count):
                answer, change, name = bench(folder, again, last)
                last = name if again == 0 else last
                if answer:
                    told[answer] += 1
                    changes.append(f"{100 * change:+.1f}")
            words = ", ".join(f"{answer} {number}" for answer, number in told.items())
            print(f"{again} % of the rows twice: {words}; changes in %: {' '.join(changes)}", flush=True)
        print(f"{(time.monotonic() - began) / (records + 2 * planted):.1f} s a record of 7 runs")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
