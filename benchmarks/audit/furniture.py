"""Shared by the scripts: timing, and the command line and audit of a model."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from assay.precision.auditing import Audit, audit
from assay.precision.loading import Loaded, load

HELD_OUT = Path(__file__).resolve().parents[2] / "configs" / "models" / "held-out.txt"


def best_time(
    run: Callable[[], object], repeats: int = 7, clock: Callable[[], float] = time.perf_counter, warm: bool = True
) -> float:
    """Return the least of several times, in seconds, after one run that isn't counted."""
    if warm:
        run()
    times = []
    for _ in range(repeats):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def options(description: str | None, *, sequences: int, batch: int, seed: int) -> argparse.ArgumentParser:
    """Return the command line of a script that audits a model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled model's name, or a directory")
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=sequences)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--metric", default="", help="kl or relative; by default relative for an encoder, else kl")
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def audited(given: argparse.Namespace, seed: int = 0) -> tuple[Loaded, Audit, float]:
    """Return the model named on the command line, its calibrated audit, and the processor seconds of the audit."""
    loaded = load(given.model)
    batches = loaded.batches(given.text, sequence=given.tokens, sequences=given.sequences, batch=given.batch)
    metric = given.metric or ("relative" if loaded.kind == "encoder" else "kl")
    began = time.process_time()
    result = audit(loaded.model, batches, metric, bits=loaded.stored.itemsize * 8, seed=seed)
    spent = time.process_time() - began
    result.calibrate()
    return loaded, result, spent
