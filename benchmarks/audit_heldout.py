"""Whether an audit's intervals hold on text that it hasn't seen: `audit_heldout.py MODEL [--text FILE --splits N]`.

The sequences of a text are split at random, a quarter held out; the model is audited and calibrated on the others
as its users do, and fresh assignments of several kinds are predicted and measured on the held-out ones. Prints of
each kind the median and the ends of predicted / measured, how many measurements the intervals hold, how many lie
above, and how wide intervals are (high / low, median); then the processor time of the audits. `--splits` repeats it
with others.
"""

import random
import time

import numpy as np
import torch
from furniture import options

from assay.precision.auditing import Audit, audit
from assay.precision.loading import load
from assay.precision.prediction.quadratic_form import Prediction

EACH = 20
OPTIMISED = 8
Pairs = dict[str, list[tuple[Prediction, float]]]


def assignments(found: Audit, draw: random.Random) -> dict[str, list[dict[str, str]]]:
    """Fresh assignments by their kind, of sites drawn at random."""
    inside = [site for site in found.sites if site.place in ("activation", "kv_cache")]
    alone = [{str(site): scheme} for site in inside for scheme in found.menu(site)]
    return {
        "random, all sites": [found.random_assignment(draw) for _ in range(EACH)],
        "random, 30 % of sites": [found.random_assignment(draw, 0.3) for _ in range(EACH)],
        "sparse, 5 % of sites": [found.random_assignment(draw, 0.05) for _ in range(EACH)],
        "one activation or KV cache": draw.sample(alone, EACH),
        "70 % of those": [
            {str(site): draw.choice(found.menu(site)) for site in inside if draw.random() < 0.7} for _ in range(EACH)
        ],
    }


def judged(found: Audit, draw: random.Random) -> Pairs:
    """Predictions and measurements on held-out sequences; optimised: recommended under random budgets of bytes."""
    pairs = {
        kind: [(found.predict(one), float(found.measure(one))) for one in some]
        for kind, some in assignments(found, draw).items()
    }
    whole = found.cost({}).bytes
    chosen = [found.recommend(max_bytes=whole * draw.uniform(0.28, 0.9)) for _ in range(OPTIMISED)]
    return {**pairs, "optimised": [(one.prediction, float(one.measured)) for one in chosen]}


def told(kind: str, pairs: list[tuple[Prediction, float]]) -> None:
    """Print the row of a kind."""
    usable = [(prediction, error) for prediction, error in pairs if prediction.error > 0 and error > 0]
    ratio = np.array([prediction.error / error for prediction, error in usable])
    inside = np.mean([prediction.low <= error <= prediction.high for prediction, error in usable])
    above = np.mean([error > prediction.high for prediction, error in usable])
    width = np.median([prediction.high / max(prediction.low, 1e-300) for prediction, _ in usable])
    ends = f"{ratio.min():.2f}/{ratio.max():.2f}"
    print(f"| {kind} | {len(usable)} | {np.median(ratio):.3f} | {ends} | {inside:.0%} | {above:.0%} | {width:.2f} |")


def main() -> None:
    """Read the command line and measure."""
    parser = options(__doc__, sequences=64, batch=8, seed=0)
    parser.add_argument("--splits", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(given.model)
    batches = loaded.batches(given.text, sequence=given.tokens, sequences=given.sequences, batch=given.batch)
    batches = [batch for batch in batches if batch["input_ids"].shape[1] == given.tokens]
    rows = torch.cat([batch["input_ids"] for batch in batches])
    pairs: Pairs = {}
    spent = []
    for split in range(given.seed, given.seed + given.splits):
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(split))]
        held = len(rows) // 4
        check, choice = (
            [{"input_ids": some, "attention_mask": torch.ones_like(some)} for some in part.split(given.batch)]
            for part in (mixed[:held], mixed[held:])
        )
        began = time.process_time()
        found = audit(loaded.model, choice, given.metric or "kl", check=check, bits=16, seed=split)
        found.calibrate()
        spent.append(time.process_time() - began)
        level = found.predict(found.random_assignment(random.Random(0))).level
        print(f"split {split}: {spent[-1]:.1f} s, intervals promise {level:.1%}", flush=True)
        for kind, some in judged(found, random.Random(100 + split)).items():
            pairs.setdefault(kind, []).extend(some)
    print("| kind | n | predicted / measured, median | ends | inside | above | high / low |")
    print("|---|---|---|---|---|---|---|")
    for kind, each in pairs.items():
        told(kind, each)
    print(f"audit and calibration: {np.mean(spent):.1f} s of processor time")


if __name__ == "__main__":
    main()
