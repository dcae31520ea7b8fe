"""Measure whether an audit's intervals hold on unseen text: `heldout.py MODEL [--text FILE --splits N]`.

The sequences of a text are split at random, and a quarter is held out. The model is audited and calibrated on the
others, as its users do. New assignments of several kinds are then predicted and measured on the held-out sequences, and
on as many sequences of twice the length from later text; for the latter, also after calibrating the same assignments
again on further sequences of that length. For each kind it prints how many predictions have a calibrated interval, and
for these the median and the ends of predicted / measured, the number of measurements inside of and above their
intervals, the median width of the intervals (high / low) and Spearman's rank correlation; then how many of the
uncalibrated intervals hold; then the measurements of the audits, how often they ran the model's blocks, and their
processor time. `--splits` repeats it with other splits, `--each` with more assignments of a kind.
"""

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
from assay.precision.observation.sites import Site
from assay.precision.prediction.measuring import Evaluator, evaluation_data
from assay.precision.prediction.predictor import Predictor
from assay.precision.prediction.quadratic_form import Prediction
from assay.precision.schemes import SCHEMES

HELD_OUT = Path(__file__).resolve().parents[2] / "configs" / "models" / "held-out.txt"
Pairs = dict[str, list[tuple[Prediction, float]]]
HEAD = (
    "| kind | n | predicted / measured, median | ends | inside | above | high / low | Spearman | guesses inside |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the command line of a script that audits a model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a bundled model's name, or a directory")
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--metric", default="", help="kl or relative; by default relative for an encoder, else kl")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def assignments(result: Audit, draw: random.Random, each: int) -> dict[str, list[dict[str, str]]]:
    """Return new assignments of random sites, by their kind."""
    free = [site for site in result.sites if not site.tied]
    values = [site for site in free if site.type in ("activation", "kv_cache")]
    caches = [site for site in free if site.type == "kv_cache"]
    stages = [site for site in free if site.in_attention and site.type == "activation"]
    weights = {
        str(site): [name for name in result.menu(site) if SCHEMES[name].weight and not SCHEMES[name].activation]
        for site in free
    }
    indices: dict[str, list[Site]] = {}
    for site in free:
        indices.setdefault(str(site).rpartition(".")[2], []).append(site)

    def some(sites: Sequence[Site], share: float) -> dict[str, str]:
        taken = [site for site in sites if draw.random() < share] or [draw.choice(sites)]
        return {str(site): draw.choice(result.menu(site)) for site in taken}

    def at_one_site_kind() -> dict[str, str]:
        sites = indices[draw.choice(sorted(indices))]
        scheme = draw.choice(sorted({name for site in sites for name in result.menu(site)}))
        return {str(site): scheme for site in sites if scheme in result.menu(site)}

    def of_weights() -> dict[str, str]:
        share = draw.choice((1.0, 0.5, 0.2))
        return {site: draw.choice(menu) for site, menu in weights.items() if menu and draw.random() < share}

    kinds: dict[str, Callable[[], dict[str, str]]] = {
        "random, all sites": lambda: result.random_assignment(draw),
        "random, 30 % of sites": lambda: result.random_assignment(draw, 0.3),
        "sparse, 5 % of sites": lambda: result.random_assignment(draw, 0.05),
        "70 % of activations and KV caches": lambda: some(values, 0.7),
        "70 % of KV caches": lambda: some(caches, 0.7),
        "70 % of attention's stages": lambda: some(stages, 0.7),
        "one scheme at one place of all layers": at_one_site_kind,
        "weights alone": of_weights,
        "one activation or KV cache": lambda: some([draw.choice(values)], 1.0),
        "one linear or embedding": lambda: some([draw.choice([each for each in free if each not in values])], 1.0),
    }
    present = {"70 % of KV caches": caches, "70 % of attention's stages": stages}
    return {name: [make() for _ in range(each)] for name, make in kinds.items() if present.get(name, True)}


def judged(result: Audit, longer: Evaluator, there: Predictor, draw: random.Random, each: int) -> tuple[Pairs, Pairs]:
    """Predict and measure on held-out sequences, and on longer ones, with and without calibration there.

    optimised: recommended under random budgets of bytes.
    """
    whole, passes = result.cost({}).bytes, result.choice_evaluator.passes
    kinds: dict[str, list[dict[str, str]]] = assignments(result, draw, each)
    limits = [whole * draw.uniform(0.28, 0.9) for _ in range(-(-each // 3))]
    kinds["optimised"] = [result.recommend(max_bytes=limit) for limit in limits]
    print(f"{len(limits)} recommendations took {result.choice_evaluator.passes - passes:.1f} passes", flush=True)
    seen, far = Pairs(), Pairs()
    for kind, some in kinds.items():
        longer.measure_all(some[::2])
        seen[kind] = [
            (result.predict(one), float(error)) for one, error in zip(some, result.measure_together(some), strict=True)
        ]
        for name, predict in (("", result.predict), (", calibrated there", there.predict)):
            pairs = [(predict(result.checked(one)), float(longer.error(one))) for one in some[::2]]
            far[f"{kind}, twice the length{name}"] = pairs
    return seen, far


def reported(kind: str, pairs: list[tuple[Prediction, float]]) -> None:
    """Print the row of a kind."""
    every = [(each, error, each.low <= error <= each.high) for each, error in pairs if each.error > 0 and error > 0]
    usable = [each for each in every if each[0].level]
    guessed = [inside for prediction, _, inside in every if not prediction.level]
    guesses = f"{sum(guessed)} of {len(guessed)}"
    if not usable:
        print(f"| {kind} | 0 | | | | | | | {guesses} |")
        return
    predictions, errors, inside = zip(*usable, strict=True)
    predicted = np.array([each.error for each in predictions])
    ratio = predicted / np.array(errors)
    above = np.mean([error > each.high for each, error, _ in usable])
    width = np.median([each.high / max(each.low, 1e-300) for each in predictions])
    ends = f"{ratio.min():.2f}/{ratio.max():.2f}"
    share = f"{np.mean(inside):.0%} | {above:.0%} | {width:.2f} | {spearmanr(predicted, errors)[0]:.3f}"
    print(f"| {kind} | {len(usable)} | {np.median(ratio):.3f} | {ends} | {share} | {guesses} |")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--each", type=int, default=20, help="assignments of a kind and split")
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(given.model)
    count = given.sequences + given.sequences // 4 * 4
    batches = loaded.batches(given.text, sequence=given.tokens, sequences=count, batch=given.batch)
    rows = torch.cat([batch["input_ids"] for batch in batches if batch["input_ids"].shape[1] == given.tokens])
    rows, later = rows[: given.sequences], rows[given.sequences :]
    doubled = later[: len(later) // 4 * 4].reshape(-1, 2 * given.tokens)
    doubled = doubled[torch.randperm(len(doubled), generator=torch.Generator().manual_seed(given.seed))]
    pairs: Pairs = {}
    further: Pairs = {}
    spent = []
    for split in range(given.seed, given.seed + given.splits):
        mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(split))]
        held = len(rows) // 4
        check, choice, near, long = (
            [{"input_ids": some, "attention_mask": torch.ones_like(some)} for some in part.split(given.batch)]
            for part in (mixed[:held], mixed[held:], *doubled.chunk(2))
        )
        began = time.process_time()
        result = audit(loaded.model, choice, given.metric or "kl", check=check, bits=16, seed=split)
        predicted = time.process_time() - began
        result.calibrate()
        spent.append(time.process_time() - began)
        level = result.predict(result.random_assignment(random.Random(0))).level
        print(
            f"split {split}: {spent[-1]:.1f} s, {predicted:.1f} s of it before anything is measured; "
            f"{len(result.measured)} measurements, {result.choice_evaluator.passes:.1f} passes; "
            f"intervals promise {level:.1%}; {result.predictor.calibration}",
            flush=True,
        )
        longer = Evaluator(
            result.model, evaluation_data(result.model, long, result.metric, "long"), result.metric, result.observed
        )
        there = result.predictor_over(near, sum(len(batch["input_ids"]) for batch in long))
        seen, far = judged(result, longer, there, random.Random(100 + split), given.each)
        for kind, some in seen.items():
            pairs.setdefault(kind, []).extend(some)
        for kind, some in far.items():
            further.setdefault(kind, []).extend(some)
    print(HEAD)
    for kind, some in (*pairs.items(), *further.items()):
        reported(kind, some)
    print(f"audit and calibration: {np.mean(spent):.1f} s of processor time")


if __name__ == "__main__":
    main()
