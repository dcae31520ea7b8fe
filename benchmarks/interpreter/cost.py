"""What the faithful interpreter costs beside Triton's own, and in which versions of Triton its self-tests hold.

python benchmarks/interpreter/cost.py cost          both, and the sanitizer, on the same kernels, in one process
python benchmarks/interpreter/cost.py versions      each known version of Triton, in an environment of its own
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
ROOT = Path(__file__).resolve().parents[2]

_TRY = """
import json, torch, triton
from assay.kernels.triton.softmax import softmax
from assay.verify import examine
from assay.interpreter import faithful
from assay.interpreter.self_test import self_test
with faithful():
    wrong = {claim: reason for claim, reason in self_test().items() if reason}
verdict = examine(softmax, "softmax", dtype="bfloat16", examples=20)
print(json.dumps({"version": triton.__version__, "wrong": wrong, "softmax": verdict.outcome}))
"""


def versions() -> int:
    """Self-tests under `faithful` and an examination, in each version; beside it, how many Triton's own fails."""
    failed = 0
    for version in VERSIONS:
        environment = ROOT / "build" / f"triton-{version}"
        if not environment.exists():
            install = ["pip", "install", "--quiet", "--no-deps", "--target", str(environment), f"triton=={version}"]
            subprocess.run([sys.executable, "-m", *install], check=True)
        settings = {**os.environ, "PYTHONPATH": str(environment)}
        ours = _last_line([sys.executable, "-c", _TRY], settings)
        plain = [sys.executable, "-W", "ignore", "-m", "assay.interpreter.self_test"]
        own = json.loads(_last_line(plain, {**settings, "TRITON_INTERPRET": "1"}))
        print(f"{ours}  (Triton's own interpreter: {sum(map(bool, own.values()))} of {len(own)} wrong)", flush=True)
        result = json.loads(ours)
        failed += bool(result["wrong"]) or result["softmax"] != "PASS" or result["version"] != version
    return failed


def _last_line(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr}")
    return done.stdout.strip().splitlines()[-1]


def cost() -> int:
    """Best of several runs of each kernel: Triton's own interpreter, ours, and ours with the sanitizer."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from workloads import WORKLOADS

    from assay.interpreter import faithful, sanitized

    contexts = {"plain": contextlib.nullcontext, "faithful": faithful, "sanitized": sanitized}
    print(f"{'kernel':32}{'plain':>9}{'faithful':>10}{'sanitized':>11} [ms]   ratios (goals: at most 1.5 and 3)")
    torch.manual_seed(0)
    worst = [0.0, 0.0]
    for name, run in WORKLOADS.items():
        times = dict.fromkeys(contexts, float("inf"))
        for _ in range(7):
            for context, enter in contexts.items():
                with enter():
                    start = time.perf_counter()
                    run()
                    times[context] = min(times[context], time.perf_counter() - start)
        ratios = [times[context] / times["plain"] for context in ("faithful", "sanitized")]
        worst = [max(pair) for pair in zip(worst, ratios, strict=True)]
        plain, ours, checked = (seconds * 1e3 for seconds in times.values())
        print(f"{name:32}{plain:9.1f}{ours:10.1f}{checked:11.1f}       {ratios[0]:5.2f} {ratios[1]:5.2f}")
    return int(worst[0] > 1.5 or worst[1] > 3)


if __name__ == "__main__":
    sys.exit({"cost": cost, "versions": versions}[sys.argv[1] if len(sys.argv) > 1 else "cost"]())
