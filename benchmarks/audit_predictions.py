"""How well an audit predicts, and what it takes: `audit_predictions.py MODEL --text FILE [--sequences N --tokens N]`.

Audits the model and calibrates as its users do; then fresh random assignments, and those of the front of bytes and
error, are predicted and measured. Prints of either the median of predicted / measured, how many measurements the 95 %
intervals hold, and Spearman's rank correlation; then processor time of the pass that predicts, in multiples of one
plain forward and backward pass, and of one forward pass for each (site, scheme), which it replaces.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from assay.precision.auditing import Audit, audit
from assay.precision.loading import load
from assay.precision.model.running import call, mapping, settled
from assay.precision.prediction import Prediction


def told(name: str, pairs: Sequence[tuple[Prediction, float]]) -> None:
    """Print a row of predictions against measurements."""
    predicted = np.array([prediction.error for prediction, _ in pairs])
    measured = np.array([error for _, error in pairs])
    inside = np.mean([prediction.low <= error <= prediction.high for prediction, error in pairs])
    width = np.median([prediction.high / prediction.low for prediction, _ in pairs])
    rank = spearmanr(predicted, measured)[0]
    print(
        f"{name:28} {len(pairs):4}  median {np.median(predicted / measured):.3f}  inside {inside:.0%}  "
        f"Spearman {rank:.3f}  high/low {width:.2f}  errors {measured.min():.2g} to {measured.max():.2g}",
        flush=True,
    )


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """Least processor time of some runs."""
    found = []
    for _ in range(times):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def passes(found: Audit) -> tuple[float, float]:
    """Processor time of plain forward passes over the data, and of forward and backward ones."""

    def forward() -> None:
        with torch.no_grad(), settled(found.model):
            for batch in found.batches:
                call(found.model, batch)

    def both() -> None:
        weights = [parameter for parameter in found.model.parameters() if parameter.is_floating_point()]
        for batch in found.batches:
            output = found.metric.output(call(found.model, batch), mapping(batch))
            torch.autograd.grad(output, weights, torch.ones_like(output), allow_unused=True)

    return seconds(forward), seconds(both)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled model or a local directory")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--metric", default="kl", help="kl or relative")
    parser.add_argument("--assignments", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    loaded = load(given.model)
    batches = loaded.batches(given.text, sequence=given.tokens, sequences=given.sequences, batch=given.batch)
    began = time.process_time()
    found = audit(loaded.model, batches, given.metric, bits=16)
    audited = time.process_time() - began
    found.calibrate()
    draw = random.Random(given.seed)
    for share in (1.0, 0.3):
        some = [found.random_assignment(draw, share) for _ in range(given.assignments)]
        told(f"random, {share:.0%} of sites", [(found.predict(one), found.measure(one)) for one in some])
    front = [one for *_, one in found.pareto()]
    told("front of bytes and error", [(found.predict(one), found.measure(one)) for one in front if one])
    forward, both = passes(found)
    pairs = sum(len(found.menu(site)) for site in found.sites if not site.tied)
    print(f"{len(found.sites)} sites, {pairs} pairs of site and scheme; the audit before calibration {audited:.1f} s")
    print(f"looking {found.seconds['looking']:.1f} s, predicting {found.seconds['predicting']:.1f} s of wall time")
    print(f"one forward pass {forward:.2f} s, with a backward pass {both:.2f} s: {audited / both:.2f} times that,")
    print(f"and a forward pass for each pair would take {pairs * forward / audited:.0f} times as long as the audit")


if __name__ == "__main__":
    main()
