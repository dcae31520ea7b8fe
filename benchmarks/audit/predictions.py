"""How well an audit predicts, and what it takes: `predictions.py MODEL --text FILE [--sequences N --tokens N]`.

Audits the model and calibrates as its users do; then fresh random assignments, and those of the front of bytes and
error, are predicted and measured. Prints of either the median of predicted / measured, how many measurements the 95 %
intervals hold, and Spearman's rank correlation; then processor time of the pass that predicts, in multiples of one
plain forward and backward pass, and of one forward pass for each (site, scheme), which it replaces.
"""

import random
import time
from collections.abc import Sequence

import numpy as np
import torch
from furniture import audited, best_time, options
from scipy.stats import spearmanr

from assay.precision.auditing import Audit
from assay.precision.observation.running import call, evaluating, mapping
from assay.precision.prediction.quadratic_form import Prediction


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


def passes(found: Audit) -> tuple[float, float]:
    """Processor time of plain forward passes over the data, and of forward and backward ones."""

    def forward() -> None:
        with torch.no_grad(), evaluating(found.model):
            for batch in found.batches:
                call(found.model, batch)

    def both() -> None:
        weights = [parameter for parameter in found.model.parameters() if parameter.is_floating_point()]
        for batch in found.batches:
            output = found.metric.output(call(found.model, batch), mapping(batch))
            torch.autograd.grad(output, weights, torch.ones_like(output), allow_unused=True)

    forward_time, both_time = (best_time(run, 3, time.process_time, warm=False) for run in (forward, both))
    return forward_time, both_time


def main() -> None:
    """Read the command line and measure."""
    parser = options(__doc__, sequences=64, batch=16, seed=1)
    parser.add_argument("--assignments", type=int, default=100)
    given = parser.parse_args()
    _, found, spent = audited(given)
    draw = random.Random(given.seed)
    for share in (1.0, 0.3) if given.assignments else ():
        some = [found.random_assignment(draw, share) for _ in range(given.assignments)]
        told(f"random, {share:.0%} of sites", [(found.predict(one), found.measure(one)) for one in some])
    seen = [assignment for assignment, _ in found.measured]
    front = [one for *_, one in found.pareto(40) if one and one not in seen]  # others than the interval is fitted to
    told("front of bytes and error", [(found.predict(one), found.measure(one)) for one in front])
    forward, both = passes(found)
    pairs = sum(len(found.menu(site)) for site in found.sites if not site.tied)
    print(f"{len(found.sites)} sites, {pairs} pairs of site and scheme; the audit before calibration {spent:.1f} s")
    print(f"looking {found.seconds['looking']:.1f} s, predicting {found.seconds['predicting']:.1f} s of wall time")
    print(f"one forward pass {forward:.2f} s, with a backward pass {both:.2f} s: {spent / both:.2f} times that,")
    print(f"and a forward pass for each pair would take {pairs * forward / spent:.0f} times as long as the audit")


if __name__ == "__main__":
    main()
